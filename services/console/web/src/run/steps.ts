// From a point of a curve to a step.

/** Returns the number of `sorted` that is nearest to `value`, the smaller of two that are as near; null without any. */
export function findNearest(sorted: readonly number[], value: number): number | null {
  let best: number | null = null;
  for (const candidate of sorted) {
    if (best === null || Math.abs(candidate - value) < Math.abs(best - value)) best = candidate;
  }
  return best;
}

/** Chooses the step that a reader meant: one that kept its trajectories, if there is one within `reach` steps. */
export function snapStep(saved: readonly number[], step: number, reach: number): number {
  const nearest = findNearest(saved, step);
  return nearest !== null && Math.abs(nearest - step) <= reach ? nearest : step;
}

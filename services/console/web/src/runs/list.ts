// Which runs the list shows, and which two of them are compared.
import type { Model } from "../api/client";

export type Run = Model<"RunRow">;

/** Keeps the runs with all words in name, model, algorithm, state, tags or note, and with the tag, if one is chosen. */
export function filterRuns(runs: Run[], text: string, tag: string): Run[] {
  const words = text.toLowerCase().split(/\s+/);
  return runs.filter(({ id, model, algorithm, state, notes }) => {
    const searched = [id, model, algorithm, state, ...notes.tags, notes.note].join("\n").toLowerCase();
    return words.every((word) => searched.includes(word)) && (tag === "" || notes.tags.includes(tag));
  });
}

/** Lists the tags of all runs with their numbers, the most frequent first. */
export function countTags(runs: Run[]): [string, number][] {
  const counts = new Map<string, number>();
  for (const { notes } of runs) for (const tag of notes.tags) counts.set(tag, (counts.get(tag) ?? 0) + 1);
  return [...counts].toSorted(([one, few], [other, many]) => many - few || one.localeCompare(other));
}

/** Adds a run to those chosen, or takes it away; of more than two the one chosen first is given up. */
export function choose(chosen: readonly string[], id: string): string[] {
  return chosen.includes(id) ? chosen.filter((other) => other !== id) : [...chosen, id].slice(-2);
}

/** Orders two chosen runs for the comparison: the older one, or the one whose start is not known, is A. */
export function orderByStart(chosen: readonly string[], runs: Run[]): string[] {
  const start = (id: string) => runs.find((run) => run.id === id)?.started ?? 0;
  return chosen.toSorted((one, other) => start(one) - start(other));
}

/** Describes how far a run is: "12 / 40", or "12" where the end is not known. */
export function describeSteps({ step, total_steps }: Run): string {
  return total_steps === null ? String(step) : `${step} / ${total_steps}`;
}

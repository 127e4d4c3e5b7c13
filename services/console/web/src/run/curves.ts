// The curves of a run that goes on: what is new is added to what is there.
import type { Model } from "../api/client";

export type Curves = Model<"Curves">;

/** Adds later steps. Where they overlap, a run that went back a few steps, the newer rows replace the older. */
export function mergeCurves(old: Curves, newer: Curves): Curves {
  const first = newer.steps[0];
  if (first === undefined) return old;
  const cut = old.steps.findIndex((step) => step >= first);
  const kept = cut === -1 ? old.steps.length : cut;
  const names = new Set([...Object.keys(old.columns), ...Object.keys(newer.columns)]);
  const join = <Value>(before: Value[] | undefined, after: Value[] | undefined): (Value | null)[] => [
    ...(before?.slice(0, kept) ?? Array<null>(kept).fill(null)),
    ...(after ?? Array<null>(newer.steps.length).fill(null)),
  ];
  return {
    steps: [...old.steps.slice(0, kept), ...newer.steps],
    time: join(old.time, newer.time),
    columns: Object.fromEntries([...names].map((name) => [name, join(old.columns[name], newer.columns[name])])),
  };
}

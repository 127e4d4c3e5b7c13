// Curves of two runs over the same steps.
import type { Model } from "../api/client";
import type { Values } from "../ui/curveData";

type Curves = Model<"Curves">;

/** What is shown until somebody chooses, as far as both runs have it. */
const FIRST = ["reward_mean", "em_mean", "search_rate", "kl_ref", "entropy", "response_tokens_mean"];

export function chooseMetrics(known: string[], wanted: string[]): string[] {
  const chosen = wanted.length > 0 ? wanted : FIRST;
  const kept = chosen.filter((name) => known.includes(name));
  return kept.length > 0 || wanted.length > 0 ? kept : known.slice(0, 4);
}

/** Puts a metric of two runs over the steps of both; a step that a run has not is a gap. */
export function overlay(a: Curves, b: Curves, name: string): { steps: number[]; a: Values; b: Values } {
  const steps = [...new Set([...a.steps, ...b.steps])].toSorted((one, other) => one - other);
  const spread = ({ steps: own, columns }: Curves): Values => {
    const values = new Map(own.map((step, row) => [step, columns[name]?.[row] ?? null]));
    return steps.map((step) => values.get(step) ?? null);
  };
  return { steps, a: spread(a), b: spread(b) };
}

/** Writes a setting's value as YAML would, in one line. */
export function formatSetting(value: unknown): string {
  if (value === null || value === undefined) return "–";
  if (typeof value === "string") return value === "" ? '""' : value;
  return JSON.stringify(value);
}

/** Writes a difference of shares in percentage points, with its sign. */
export function formatPoints(value: number): string {
  const points = (100 * value).toFixed(1);
  return Number(points) > 0 ? `+${points}` : points === "-0.0" ? "0.0" : points.replace("-", "−");
}

/** Writes a p-value; the smallest that a bootstrap can give is a bound. */
export function formatP(p: number): string {
  return p < 0.001 ? "p < 0.001" : `p = ${p.toFixed(3)}`;
}

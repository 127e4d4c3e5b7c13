import type { Model } from "../api/client";
import { formatDuration } from "../ui/format";

type Wait = Model<"WaitRow">;

/** Says when a wait ends by itself, `elapsed` seconds after it was read; limits count down between two readings. */
export function describeLimit(wait: Wait, elapsed: number): string {
  if (wait.gives_up_in_s === null) return wait.why_unlimited === null ? "no limit" : `no limit: ${wait.why_unlimited}`;
  const left = wait.gives_up_in_s - elapsed;
  return left > 0 ? `gives up in ${formatDuration(Math.ceil(left))}` : "gives up now";
}

/** Whether a wait is about to end in an error: less than a fifth of its limit is left. */
export function isUrgent(wait: Wait, elapsed: number): boolean {
  if (wait.gives_up_in_s === null || wait.is_idle) return false;
  const left = wait.gives_up_in_s - elapsed;
  return left < (wait.waited_s + wait.gives_up_in_s) / 5;
}

/** Orders waits by what a person should look at: those that end in an error first, then for work. */
export function orderWaits(waits: Wait[]): Wait[] {
  return waits.toSorted(
    (a, b) =>
      Number(a.is_idle) - Number(b.is_idle) || (a.gives_up_in_s ?? Infinity) - (b.gives_up_in_s ?? Infinity) || 0,
  );
}

export type Tone = "good" | "bad" | "warn" | "calm";

/**
 * The tone of a service's state. What is silent is an alarm only while the run goes on: services of a run that has ended
 * are gone, as they should be.
 */
export function toneOf(state: string, isOver: boolean): Tone {
  if (state === "ready") return "good";
  if (state === "not running" || isOver) return "calm";
  return state === "slow" || state === "not ready" ? "warn" : "bad";
}

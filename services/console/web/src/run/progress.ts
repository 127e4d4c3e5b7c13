import type { Model } from "../api/client";
import { formatDuration } from "../ui/format";

/** Says how long a run still takes; null where it takes no more. */
export function describeTimeLeft(left: number | null, state: Model<"RunState">): string | null {
  if (state !== "running" && state !== "starting") return null;
  if (left === null || !Number.isFinite(left)) return "time left not known yet";
  if (left < 60) return "less than a minute left";
  return `about ${formatDuration(left < 600 ? Math.round(left / 10) * 10 : Math.round(left / 60) * 60)} left`;
}

/** The share that is done, from 0 to 1. */
export function shareDone({ done, total }: { done: number; total: number }): number {
  return total > 0 ? Math.min(1, Math.max(0, done / total)) : 0;
}

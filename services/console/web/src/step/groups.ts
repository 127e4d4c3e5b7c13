// The groups of a step: which are shown, and where their rewards are drawn.
import type { Model } from "../api/client";

export type Group = Model<"GroupRow">;
export type GroupState = Model<"GroupState">;

export const STATES = ["trained", "dead", "filtered", "failed", "dropped"] as const satisfies GroupState[];

/** What became of a group, in a sentence. */
export const MEANINGS: Record<GroupState, string> = {
  trained: "part of the loss",
  dead: "all rewards are equal: no advantage, nothing to learn",
  filtered: "left out by the filter of groups",
  failed: "too few of its samples were finished or scored",
  dropped: "not used: too old, or late",
};

/** Counts the groups by state; states that no group has are left out. */
export function countStates(groups: Group[]): [GroupState, number][] {
  return STATES.map((state): [GroupState, number] => [
    state,
    groups.filter((group) => group.state === state).length,
  ]).filter(([, count]) => count > 0);
}

/** Keeps the groups of a state ("" keeps all) whose question contains a text. */
export function filterGroups(groups: Group[], state: GroupState | "", text: string): Group[] {
  const wanted = text.trim().toLowerCase();
  return groups.filter(
    (group) =>
      (state === "" || group.state === state) && (wanted === "" || group.question.toLowerCase().includes(wanted)),
  );
}

/** The least and the largest reward of all groups, so that their dots have one scale. */
export function findRange(groups: Group[]): { low: number; high: number } {
  let low = Infinity;
  let high = -Infinity;
  for (const { rewards } of groups) {
    for (const reward of rewards) {
      if (reward === null) continue;
      low = Math.min(low, reward);
      high = Math.max(high, reward);
    }
  }
  return low <= high ? { low, high } : { low: 0, high: 1 };
}

export interface Dot {
  /** From 0, the least reward, to 1. */
  x: number;
  /** How many dots are below it. */
  level: number;
}

/** Places rewards on their scale; those that would cover each other are stacked. Unknown rewards have no dot. */
export function placeDots(rewards: readonly (number | null)[], { low, high }: { low: number; high: number }): Dot[] {
  const slots = 24;
  const used = new Map<number, number>();
  return rewards
    .filter((reward): reward is number => reward !== null)
    .map((reward) => {
      const x = high > low ? (reward - low) / (high - low) : 0.5;
      const slot = Math.round(x * slots);
      const level = used.get(slot) ?? 0;
      used.set(slot, level + 1);
      return { x, level };
    });
}

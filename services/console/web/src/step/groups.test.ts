import { describe, expect, it } from "vitest";
import { countStates, filterGroups, findRange, placeDots, type Group } from "./groups";

function group(changes: Partial<Group>): Group {
  return {
    uid: "u",
    data_source: "s",
    question: "Which?",
    state: "trained",
    reason: null,
    rewards: [0, 1],
    mean: 0.5,
    spread: 1,
    samples: [],
    ...changes,
  };
}

const groups = [
  group({ question: "Capital of Angola?" }),
  group({ state: "dead", rewards: [0.2, 0.2] }),
  group({ state: "failed", rewards: [null, null], question: "capital of Chad?" }),
];

it("counts states in their order, without those that are missing", () => {
  expect(countStates(groups)).toEqual([
    ["trained", 1],
    ["dead", 1],
    ["failed", 1],
  ]);
});

it("filters by state and text", () => {
  expect(filterGroups(groups, "", "")).toHaveLength(3);
  expect(filterGroups(groups, "", " CAPITAL ")).toHaveLength(2);
  expect(filterGroups(groups, "failed", "capital")).toEqual([groups[2]]);
  expect(filterGroups(groups, "dropped", "")).toEqual([]);
});

describe("rewards", () => {
  it("have one scale, also without any", () => {
    expect(findRange(groups)).toEqual({ low: 0, high: 1 });
    expect(findRange([group({ rewards: [-2, null, 3] })])).toEqual({ low: -2, high: 3 });
    expect(findRange([group({ rewards: [null] })])).toEqual({ low: 0, high: 1 });
  });
  it("are stacked where they are equal; unknown ones are not drawn", () => {
    expect(placeDots([0, 1, 1, null, 0.5], { low: 0, high: 1 })).toEqual([
      { x: 0, level: 0 },
      { x: 1, level: 0 },
      { x: 1, level: 1 },
      { x: 0.5, level: 0 },
    ]);
  });
  it("are in the middle where all are equal", () => {
    expect(placeDots([3, 3], { low: 3, high: 3 })).toEqual([
      { x: 0.5, level: 0 },
      { x: 0.5, level: 1 },
    ]);
  });
});

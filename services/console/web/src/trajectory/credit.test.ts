import { describe, expect, test } from "vitest";
import { makeSample } from "../testing/trajectories";
import {
  computeAdvantage,
  describeEstimator,
  describeRewards,
  explainAdvantage,
  formatSigned,
  type Credit,
} from "./credit";
import { countedRewards, hasDifference } from "./GroupSums";

const credit: Credit = {
  estimator: "grpo",
  rewards: [1, 0.2, 0.2, 0.2, 1, 0.2, 0.2, 0.2],
  reward: 1,
  baseline: 0.4,
  deviation: 0.37,
  trained: true,
  reason: null,
};

describe("why a search was reinforced", () => {
  test("is its reward among those of the group", () => {
    expect(explainAdvantage("This search", 1.62, credit)).toBe(
      "This search was reinforced: mean advantage +1.62. Its trajectory got reward 1; of the group's 8 samples " +
        "2 got 1 and 6 got 0.2 (mean 0.4, deviation 0.37).",
    );
  });

  test("is nothing where all rewards are equal", () => {
    const equal = { ...credit, rewards: [1, 1, 1], baseline: 1, deviation: 0 };
    expect(explainAdvantage("This search", 0, equal)).toBe(
      "This search was neither reinforced nor punished: mean advantage 0. Its trajectory got reward 1; of the group's " +
        "3 samples 3 got 1: all equal, so there is nothing to prefer.",
    );
  });

  test("is the mean of the others for RLOO, and the difference alone without a deviation", () => {
    const loo = { ...credit, estimator: "rloo", rewards: [0, 1, 0], reward: 0, baseline: null, deviation: null };
    expect(explainAdvantage("It", -0.5, loo)).toMatch(/punished: mean advantage -0.5.*the others' mean is 0.5\.$/);
    expect(explainAdvantage("It", 0.6, { ...credit, deviation: null })).toMatch(/\(mean 0.4\)\.$/);
  });

  test("is the critic's expectation for GAE, and the batch for REINFORCE++", () => {
    expect(explainAdvantage("It", 1, { ...credit, estimator: "gae" }, 0.25)).toContain("a return of 0.25");
    expect(explainAdvantage("It", 1, { ...credit, estimator: "reinforce_plus_plus" })).toContain("whole batch");
  });

  test("is not claimed for what was not trained on", () => {
    expect(explainAdvantage("It", null, { ...credit, trained: false, reason: "TIMEOUT" })).toBe(
      "No advantage: the step did not train on this trajectory (TIMEOUT).",
    );
    expect(explainAdvantage("It", null, { ...credit, trained: null })).toContain("validation");
  });

  test("is left open while the group is not known", () => {
    expect(explainAdvantage("It", 1, { ...credit, rewards: [] })).toBe("It was reinforced: mean advantage +1.");
  });
});

test.each([
  [[1, 0, 0], "1 got 1 and 2 got 0"],
  [[1], "1 got 1"],
  [[0.1, 0.2, 0.3, 0.4, 0.5], "0.5, 0.4, 0.3, 0.2, 0.1"],
  [Array.from({ length: 32 }, (_, n) => n / 10), "from 0 to 3.1"],
  [[], ""],
])("rewards %j in words", (rewards, words) => {
  expect(describeRewards(rewards)).toBe(words);
});

test("the sums lead from a reward to its advantage", () => {
  expect(computeAdvantage("grpo", [1, 0], 1, 0.5, 0.25)).toEqual({
    baseline: 0.5,
    difference: 0.5,
    advantage: 2,
  });
  expect(computeAdvantage("grpo", [1, 1], 1, 1, 0)?.advantage).toBe(0);
  expect(computeAdvantage("rloo", [1, 0, 0.5], 1, null, null)).toEqual({
    baseline: 0.25,
    difference: 0.75,
    advantage: 0.75,
  });
  expect(computeAdvantage("rloo", [1], 1, null, null)).toBeNull();
  expect(computeAdvantage("gae", [1, 0], 1, null, null)).toBeNull();
});

test("the baseline counts samples that took part", () => {
  const samples = [
    makeSample({ reward: 1 }),
    makeSample({ reward: null, status: "TIMEOUT" }),
    makeSample({ reward: 0, trained: false }),
    makeSample({ reward: 0.5 }),
  ];
  expect(countedRewards(samples)).toEqual([1, 0.5]);
});

test("stored advantages that are not the sums are noticed, roundings are not", () => {
  expect(hasDifference([{ advantage: 1.6216 }], [makeSample({ advantage: 1.62018 })])).toBe(false);
  expect(hasDifference([{ advantage: 1.6216 }], [makeSample({ advantage: 1.4 })])).toBe(true);
  expect(hasDifference([null], [makeSample({ advantage: null })])).toBe(false);
});

test.each(["grpo", "rloo", "gae", "grpo_multiturn", "reinforce_plus_plus"])("%s is described", (name) => {
  const { title, formula, words } = describeEstimator(name, true);
  expect(title).not.toBe(name);
  expect(formula).toContain("advantage = ");
  expect(words).toMatch(/\.$/);
});

test("values have their sign, 0 has none, what is unknown is a dash", () => {
  expect([1.5, -1.5, 0, null].map((value) => formatSigned(value))).toEqual(["+1.5", "-1.5", "0", "–"]);
});

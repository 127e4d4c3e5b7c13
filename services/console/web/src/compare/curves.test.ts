import { expect, test } from "vitest";
import { chooseMetrics, formatP, formatPoints, formatSetting, overlay } from "./curves";

const curves = (steps: number[], columns: Record<string, (number | null)[]>) => ({
  steps,
  time: steps.map(() => null),
  columns,
});

test("runs that saved different steps are drawn over the steps of both", () => {
  const a = curves([1, 2, 4], { reward: [0.1, null, 0.4] });
  const b = curves([2, 3], { reward: [0.2, 0.3] });
  expect(overlay(a, b, "reward")).toEqual({
    steps: [1, 2, 3, 4],
    a: [0.1, null, null, 0.4],
    b: [null, 0.2, 0.3, null],
  });
});

test("a metric that only one run has is a gap in the other", () => {
  expect(overlay(curves([1], { kl: [0] }), curves([1], {}), "kl")).toEqual({ steps: [1], a: [0], b: [null] });
});

test("until somebody chooses, the usual metrics are shown, and others where there are none of those", () => {
  expect(chooseMetrics(["entropy", "loss", "reward_mean"], [])).toEqual(["reward_mean", "entropy"]);
  expect(chooseMetrics(["x", "y"], [])).toEqual(["x", "y"]);
  expect(chooseMetrics(["x", "y"], ["y", "gone"])).toEqual(["y"]);
  expect(chooseMetrics(["x"], ["gone"])).toEqual([]);
});

test.each([
  [null, "–"],
  ["", '""'],
  ["direct", "direct"],
  [false, "false"],
  [0, "0"],
  [{ a: [1, "b"] }, '{"a":[1,"b"]}'],
])("the setting %j is shown as %s", (value, text) => {
  expect(formatSetting(value)).toBe(text);
});

test.each([
  [0.0312, "+3.1"],
  [-0.5, "−50.0"],
  [0, "0.0"],
  [-0.0001, "0.0"],
  [0.0001, "0.0"],
])("the difference %s is %s points", (value, text) => {
  expect(formatPoints(value)).toBe(text);
});

test("a p-value is no 0", () => {
  expect(formatP(0.0002)).toBe("p < 0.001");
  expect(formatP(0.0432)).toBe("p = 0.043");
});

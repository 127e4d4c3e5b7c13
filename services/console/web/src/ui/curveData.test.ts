import { describe, expect, test } from "vitest";
import { findIsolated, keepPositive, prepareValues, smooth, stack, summarize } from "./curveData";

test("the moving average begins at the first value and keeps gaps", () => {
  const smoothed = smooth([null, 2, 2, null, 2], 0.9);
  expect(smoothed[0]).toBeNull();
  expect(smoothed[3]).toBeNull();
  for (const at of [1, 2, 4]) expect(smoothed[at]).toBeCloseTo(2, 12);
});

test("the moving average weighs the newest value by what the weight leaves", () => {
  const [, second] = smooth([0, 1], 0.5);
  expect(second).toBeCloseTo(2 / 3, 12); // (0.5·0.5·0 + 0.5·1) / 0.75
  expect(smooth([1, 5], 0)).toEqual([1, 5]);
});

test("a logarithmic scale leaves out what it cannot show", () => {
  expect(keepPositive([1, 0, -2, null, 1e-9])).toEqual([1, null, null, null, 1e-9]);
});

test("only values between gaps need a point", () => {
  expect(findIsolated([1, null, 2, 3, null, 4])).toEqual([0, 5]);
  expect(findIsolated([7])).toEqual([0]);
  expect(findIsolated([])).toEqual([]);
  expect(findIsolated([null, 0, null])).toEqual([1]);
});

test("a summary knows where the extremes are, and counts what is known", () => {
  expect(summarize([10, 20, 30, 40], [null, 3, 1, null])).toEqual({
    known: 2,
    first: 3,
    firstAt: 20,
    last: 1,
    lastAt: 30,
    low: 1,
    lowAt: 30,
    high: 3,
    highAt: 20,
  });
  expect(summarize([1, 2], [null, null])).toBeNull();
});

describe("stack", () => {
  test("adds columns upon each other", () => {
    expect(
      stack([
        [1, 2],
        [10, 20],
      ]),
    ).toEqual([
      [1, 2],
      [11, 22],
    ]);
  });
  test("leaves a gap where nothing is known, and adds nothing where one value is not", () => {
    expect(
      stack([
        [1, null, null],
        [null, null, 2],
      ]),
    ).toEqual([
      [1, null, 0],
      [1, null, 2],
    ]);
  });
  test("is empty without columns", () => {
    expect(stack([])).toEqual([]);
  });
});

test("smoothing does not stretch a logarithmic axis by a value that falls towards 0", () => {
  const values = [1, ...Array<number>(2000).fill(0), 0.5];
  const { shown, measured } = prepareValues(values, 0.5, true);
  expect(measured[1]).toBeNull();
  expect(Math.min(...shown.filter((value) => value !== null))).toBeGreaterThan(0.5);
  expect(prepareValues(values, 0.5, false).shown[1]).toBeCloseTo(1 / 3);
});

import { expect, it } from "vitest";
import { findNearest, snapStep } from "./steps";

it("finds the nearest step, the smaller of two that are as near", () => {
  expect(findNearest([10, 20, 30], 16)).toBe(20);
  expect(findNearest([10, 20, 30], 15)).toBe(10);
  expect(findNearest([10, 20, 30], 500)).toBe(30);
  expect(findNearest([], 3)).toBeNull();
});

it("leads to a step that kept its trajectories, when the reader hit beside it", () => {
  expect(snapStep([10, 20], 11, 1.4)).toBe(10);
  expect(snapStep([10, 20], 13, 1.4)).toBe(13);
  expect(snapStep([10, 20], 20, 0)).toBe(20);
  expect(snapStep([], 5, 100)).toBe(5);
});

import { expect, it } from "vitest";
import { describeTimeLeft, shareDone } from "./progress";

it("rounds what is only estimated", () => {
  expect(describeTimeLeft(127, "running")).toBe("about 2 min 10 s left");
  expect(describeTimeLeft(5_001, "running")).toBe("about 1 h 23 min left");
  expect(describeTimeLeft(3, "running")).toBe("less than a minute left");
});

it("does not know before it can", () => {
  expect(describeTimeLeft(null, "starting")).toBe("time left not known yet");
});

it("is silent about runs that have ended", () => {
  expect(describeTimeLeft(100, "done")).toBeNull();
  expect(describeTimeLeft(null, "stopped")).toBeNull();
});

it("knows no share beyond the whole", () => {
  expect(shareDone({ done: 3, total: 4 })).toBe(0.75);
  expect(shareDone({ done: 0, total: 0 })).toBe(0);
  expect(shareDone({ done: 9, total: 4 })).toBe(1);
});

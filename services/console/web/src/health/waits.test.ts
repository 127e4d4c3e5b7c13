import { describe, expect, it } from "vitest";
import type { Model } from "../api/client";
import { describeLimit, isUrgent, orderWaits, toneOf } from "./waits";

function wait(changes: Partial<Model<"WaitRow">> = {}): Model<"WaitRow"> {
  return {
    what: "groups",
    on: "rollout",
    detail: "",
    waited_s: 30,
    gives_up_in_s: 70,
    why_unlimited: null,
    is_idle: false,
    count: 1,
    ...changes,
  };
}

describe("describeLimit", () => {
  it("counts down between two readings", () => {
    expect(describeLimit(wait(), 0)).toBe("gives up in 1 min 10 s");
    expect(describeLimit(wait(), 10.5)).toBe("gives up in 1 min");
    expect(describeLimit(wait(), 100)).toBe("gives up now");
  });
  it("says why there is none", () => {
    expect(describeLimit(wait({ gives_up_in_s: null, why_unlimited: "work may never come" }), 3)).toBe(
      "no limit: work may never come",
    );
    expect(describeLimit(wait({ gives_up_in_s: null }), 3)).toBe("no limit");
  });
});

it("warns in the last fifth of a limit, but not of a wait for work", () => {
  expect(isUrgent(wait(), 0)).toBe(false);
  expect(isUrgent(wait(), 51)).toBe(true);
  expect(isUrgent(wait({ is_idle: true }), 51)).toBe(false);
  expect(isUrgent(wait({ gives_up_in_s: null }), 1e6)).toBe(false);
});

it("puts first what ends in an error first", () => {
  const names = orderWaits([
    wait({ what: "idle", is_idle: true, gives_up_in_s: 1 }),
    wait({ what: "unlimited", gives_up_in_s: null }),
    wait({ what: "late", gives_up_in_s: 500 }),
    wait({ what: "soon", gives_up_in_s: 5 }),
  ]).map(({ what }) => what);
  expect(names).toEqual(["soon", "late", "unlimited", "idle"]);
});

it("is calm about services of a run that is over", () => {
  expect(toneOf("silent", false)).toBe("bad");
  expect(toneOf("silent", true)).toBe("calm");
  expect(toneOf("not running", false)).toBe("calm");
  expect(toneOf("slow", false)).toBe("warn");
  expect(toneOf("ready", true)).toBe("good");
});

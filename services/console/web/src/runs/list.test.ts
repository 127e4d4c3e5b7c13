import { expect, test } from "vitest";
import { makeRun } from "../testing/samples";
import { choose, countTags, describeSteps, filterRuns, orderByStart } from "./list";

const RUNS = [
  makeRun("demo-1", { notes: { note: "No KL term", tags: ["kl", "short"] }, started: 300 }),
  makeRun("demo-2", { algorithm: "ppo", notes: { note: "", tags: ["kl"] }, started: 100 }),
  makeRun("broken", { model: null, algorithm: null, started: null, total_steps: null, step: 3 }),
];
const ids = (text: string, tag = "") => filterRuns(RUNS, text, tag).map(({ id }) => id);

test("every word has to be somewhere, in any case", () => {
  expect(ids("")).toEqual(["demo-1", "demo-2", "broken"]);
  expect(ids("DEMO no")).toEqual(["demo-1"]);
  expect(ids("  grpo ")).toEqual(["demo-1"]);
  expect(ids("demo nothing")).toEqual([]);
});

test("a tag is a whole tag, not a part of one", () => {
  expect(ids("", "kl")).toEqual(["demo-1", "demo-2"]);
  expect(ids("", "k")).toEqual([]);
});

test("tags are counted", () => {
  expect(countTags(RUNS)).toEqual([
    ["kl", 2],
    ["short", 1],
  ]);
});

test("at most two runs are chosen", () => {
  expect(choose(choose(choose([], "a"), "b"), "c")).toEqual(["b", "c"]);
  expect(choose(["a", "b"], "a")).toEqual(["b"]);
});

test("the older run is A", () => {
  expect(orderByStart(["demo-1", "demo-2"], RUNS)).toEqual(["demo-2", "demo-1"]);
  expect(orderByStart(["demo-2", "broken"], RUNS)).toEqual(["broken", "demo-2"]);
});

test("steps without a known end are told alone", () => {
  expect(RUNS.map(describeSteps)).toEqual(["40 / 40", "40 / 40", "3"]);
});

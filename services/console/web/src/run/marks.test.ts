import { expect, it } from "vitest";
import { countKinds, makeMarks } from "./marks";

const event = (kind: string, step: number) => ({ kind, step, time: null, text: "" });
const detail = {
  saved_steps: [10, 20],
  marks: [event("start", 0), event("guard", 3), event("guard", 3), event("rollback", 4), event("eclipse", 5)],
};

it("counts kinds in the order of the legend, unknown ones last", () => {
  expect(countKinds(detail).map(({ kind, count }) => [kind, count])).toEqual([
    ["saved", 2],
    ["guard", 2],
    ["rollback", 1],
    ["eclipse", 1],
  ]);
});

it("makes one mark of several of one kind at one step, and none of hidden kinds", () => {
  expect(makeMarks(detail, ["saved", "eclipse"])).toEqual([
    { x: 3, label: "2 × guard", color: "--warn", small: false },
    { x: 4, label: "rollback", color: "--bad", small: false },
  ]);
  expect(makeMarks(detail, [])).toHaveLength(5);
});

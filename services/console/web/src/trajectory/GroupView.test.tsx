import { screen, within } from "@testing-library/react";
import { expect, test } from "vitest";
import GroupPage from "../pages/GroupPage";
import { answer, renderAt } from "../testing/render";
import { makeDetail, makeSample } from "../testing/trajectories";
import { areUnequal } from "./GroupSums";
import { listUnits } from "./layout";
import { joinUnits } from "./SampleColumn";

const UID = "facts/train/7/0";

function open(change: Record<string, unknown> = {}, search = "") {
  const other = makeDetail({
    summary: makeSample({ row: 9, sample: 1, reward: 0.2, em: 0, answer: "Birr", advantage: -1.62 }),
  });
  other.tokens?.advantage?.splice(0, 3, -1.62, -1.62, -1.62);
  const last = other.blocks.at(-1)?.pieces.at(-1);
  if (last) last.text = " Birr";
  answer({
    [`GET /api/runs/demo/groups/step-10/${encodeURIComponent(UID)}`]: {
      uid: UID,
      place: "step-10",
      data_source: "facts",
      question: "What is the currency of Uganda?",
      targets: ["Ugandan Shilling"],
      state: "trained",
      reason: null,
      estimator: "grpo",
      baseline: 0.6,
      deviation: 0.5657,
      samples: [makeDetail(), other],
      ...change,
    },
  });
  return renderAt(<GroupPage />, {
    path: "/runs/:run/groups/:place/:uid",
    address: `/runs/demo/groups/step-10/${encodeURIComponent(UID)}${search}`,
  });
}

test("rewards lead to advantages, step by step", async () => {
  open();
  const sums = await screen.findByTestId("group-sums");
  expect(sums).toHaveTextContent("GRPO: 1 got 1 and 1 got 0.2");
  expect(sums).toHaveTextContent("advantage = (reward − mean of the group) ÷ standard deviation of the group");
  const [first, second] = within(sums).getAllByTestId("group-sum");
  expect(first).toHaveTextContent(/^010\.6\+0\.40\.566\+1\.62Ugandan Shilling$/);
  expect(second).toHaveTextContent(/-0\.4.*-1\.62Birr$/);
  expect(sums).toHaveTextContent("something else counted too");
  expect(within(sums).getByRole("img")).toHaveAccessibleName("Rewards from 0.2 to 1, mean 0.6");
});

test("an estimator that does not compare rewards shows no such sums", async () => {
  open({ estimator: "gae", baseline: null, deviation: null });
  const sums = await screen.findByTestId("group-sums");
  expect(sums).toHaveTextContent("the critic's values are the baseline");
  expect(sums).not.toHaveTextContent("difference");
});

test("turns that were credited differently have columns of their own", async () => {
  const detail = makeDetail();
  const [first, second] = detail.turns;
  if (first === undefined || second === undefined) throw new Error("the example has two turns");
  first.advantage = -0.25;
  const { unmount } = open({ estimator: "grpo_multiturn", samples: [detail] });
  expect(await screen.findByTestId("group-sum")).toHaveTextContent(/\+1\.62-0\.25\+1\.62Ugandan Shilling$/);
  unmount();
  open();
  expect(await screen.findByTestId("group-sums")).not.toHaveTextContent("turn 1");
});

test.each([
  [[1.62, 1.6201], false],
  [[1, -1], true],
  [[1, null], false],
  [[0, 0], false],
  [[], false],
])("turns with %j are unequal: %j", (advantages, expected) => {
  expect(areUnequal(advantages)).toBe(expected);
});

test("samples stand side by side, on one scale", async () => {
  open();
  const samples = await screen.findAllByTestId("sample");
  expect(samples.map((sample) => sample.getAttribute("aria-label"))).toEqual(["Sample 0", "Sample 1"]);
  expect(samples[0]?.querySelector(".plus-8")).toHaveTextContent("<search>");
  expect(samples[1]?.querySelector(".minus-8")).toHaveTextContent("<search>");
});

test("two chosen samples are compared, and the choice is in the address", async () => {
  const { user, router } = open();
  const [first, second] = await screen.findAllByLabelText("compare");
  await user.click(first as HTMLElement);
  expect(screen.getByText("Choose a second sample to compare it with.")).toBeVisible();
  await user.click(second as HTMLElement);
  const found = screen.getByTestId("differences");
  expect(found.querySelector("del")).toHaveTextContent("Ugandan Shilling");
  expect(found.querySelector("ins")).toHaveTextContent("Birr");
  expect(router.state.location.search).toBe("?compare=0%2C1");
  await user.keyboard("{Escape}");
  expect(screen.queryByTestId("differences")).toBeNull();
});

test("a group without samples says what became of it", async () => {
  open({ samples: [], state: "dropped", reason: "it was too stale" });
  expect(await screen.findByTestId("empty")).toHaveTextContent("it was too stale");
});

test("neighbours of the same class become one element, without losing text", () => {
  const detail = makeDetail();
  const [, block] = detail.blocks;
  if (block === undefined) throw new Error("the example has blocks");
  const units = listUnits(block, detail.tokens?.text ?? null, () => []);
  expect(joinUnits(units, [])).toHaveLength(3);
  const plain = units.map((unit) => ({ ...unit, className: "" }));
  expect(joinUnits(plain, ["a", "a", "b"])).toEqual([
    { className: "a", text: "<search> Uganda" },
    { className: "b", text: " </search>" },
  ]);
});

import { screen, within } from "@testing-library/react";
import { expect, it } from "vitest";
import type { Model } from "../api/client";
import { answer, renderAt } from "../testing/render";
import StepPage from "./StepPage";

function makeStep(changes: Partial<Model<"StepDetail">> = {}): Model<"StepDetail"> {
  const group = { uid: "q/1/0", data_source: "nq", question: "Who?", reason: null, rewards: [0, 1, null], mean: 0.5 };
  return {
    step: 10,
    version: 9,
    metrics: { reward_mean: 0.5, loss: null },
    seconds: { total: 10, wait: 6, update: 2 },
    guards: [],
    is_saved: true,
    trajectories: 6,
    groups: [
      { ...group, state: "trained", spread: 1, samples: [{ place: "step-10", row: 0 }] },
      { ...group, uid: "q/2/0", question: "<b>Where?</b>", state: "dead", spread: 0, reason: "all equal", samples: [] },
    ],
    advantages: [
      { low: -1, high: 0, count: 30 },
      { low: 0, high: 1, count: 10 },
    ],
    previous: null,
    next: 20,
    ...changes,
  };
}

function show(step: Model<"StepDetail">, search = "") {
  answer({ [`GET /api/runs/r/steps/${step.step}`]: step, "GET /api/runs/r/steps/20": { ...step, step: 20 } });
  return renderAt(<StepPage />, { address: `/runs/r/steps/${step.step}${search}`, path: "/runs/:run/steps/:step" });
}

it("leads to the trajectories whose searching was reinforced most", async () => {
  show(makeStep());
  const link = await screen.findByTestId("most-reinforced");
  expect(link).toHaveAttribute("href", "/runs/r/trajectories?place=step-10&searches_min=1&sort=search_advantage");
});

it("shows groups by spread, with their reason, as texts", async () => {
  show(makeStep());
  const table = await screen.findByRole("table", { name: "Groups of the step" });
  const rows = within(table).getAllByRole("row").slice(1);
  expect(rows[0]).toHaveTextContent("Who?");
  expect(rows[1]).toHaveTextContent("<b>Where?</b>all equal");
  expect(within(table).getByRole("link", { name: "Who?" })).toHaveAttribute("href", "/runs/r/groups/step-10/q%2F1%2F0");
  expect(within(table).getAllByRole("img", { name: "rewards 0, 1, –" })).toHaveLength(2);
});

it("filters groups by state, in the address", async () => {
  const { user, router } = show(makeStep());
  await user.click(await screen.findByTestId("state-dead"));
  expect(router.state.location.search).toBe("?state=dead");
  expect(screen.queryByText("Who?")).toBeNull();
});

it("goes to the next step that kept its trajectories, with the same filter", async () => {
  const { user, router } = show(makeStep(), "?state=dead");
  await screen.findByTestId("next");
  await user.keyboard("{ArrowRight}");
  expect(router.state.location.pathname + router.state.location.search).toBe("/runs/r/steps/20?state=dead");
});

it("offers the nearest steps where the trajectories are not kept", async () => {
  show(makeStep({ step: 13, is_saved: false, previous: 10, next: 20, groups: [], advantages: [] }));
  expect((await screen.findAllByTestId("nearest")).map((link) => link.getAttribute("href"))).toEqual([
    "/runs/r/steps/10",
    "/runs/r/steps/20",
  ]);
  expect(screen.queryByTestId("most-reinforced")).toBeNull();
});

it("sums up advantages and times in words", async () => {
  show(makeStep());
  expect(await screen.findByTestId("histogram")).toHaveTextContent(
    "advantages of 40 tokens, from -1 to 1; 25 % above 0",
  );
  const time = screen.getByTestId("time-bar");
  expect(time).toHaveTextContent("waiting for trajectories 6.00 s, 60 %");
  expect(time).toHaveTextContent("other 2.00 s, 20 %");
});

it("says that a word is no step", async () => {
  answer({});
  renderAt(<StepPage />, { address: "/runs/r/steps/ten", path: "/runs/:run/steps/:step" });
  expect(await screen.findByTestId("empty")).toHaveTextContent('"ten" is no step');
});

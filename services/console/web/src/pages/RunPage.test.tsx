import { screen, waitFor, within } from "@testing-library/react";
import { expect, it } from "vitest";
import { answer, renderAt } from "../testing/render";
import { GOING, makeDetail, makeRun } from "../testing/samples";
import RunPage from "./RunPage";

const curves = {
  steps: [1, 2, 3],
  time: [null, null, null],
  columns: { reward_mean: [0.1, null, 0.3], em_mean: [0, 0.5, 0.25], loss: [1, 2, 3] },
};

function show(detail = makeDetail(), search = "") {
  const { requests } = answer({ "GET /api/runs/r": detail, "GET /api/runs/r/curves": curves });
  return { requests, ...renderAt(<RunPage />, { address: `/runs/r${search}`, path: "/runs/:run" }) };
}

it("says how far the run is, and its numbers; what is not known is a dash", async () => {
  show();
  expect(await screen.findByTestId("run-progress")).toHaveTextContent("step 3 of 40");
  expect(screen.getByTestId("time-left")).toHaveTextContent("about 10 min left");
  const tiles = screen.getByTestId("tiles");
  expect(tiles).toHaveTextContent("EM, greedy50.0 % (40.0–60.0)");
  expect(tiles).toHaveTextContent("EM, sampled25.0 %");
  expect(tiles).toHaveTextContent("search rate–");
});

it("draws sampled and greedy exact match in one figure, with different names", async () => {
  const em = { mean: 0.4, low: 0.3, high: 0.5, count: 100 };
  const row = { label: "before", step: 0, is_watch: false, em, em_by_source: {}, failed: 0, count: 100, metrics: {} };
  show(makeDetail({ validations: [row] }));
  const figure = within(await screen.findByRole("figure", { name: "Exact match" }));
  expect(figure.getByRole("button", { name: /sampled, all sources/ })).toBeVisible();
  expect(figure.getByRole("button", { name: /greedy, validations/ })).toBeVisible();
});

it("asks only for steps that are new, and keeps what is there", async () => {
  const { client } = show();
  await screen.findByRole("figure", { name: "Reward" });
  const { requests } = answer({
    "GET /api/runs/r": makeDetail({ run: makeRun("r", { ...GOING, step: 4 }) }),
    "GET /api/runs/r/curves": { steps: [4], time: [null], columns: { reward_mean: [0.9], em_mean: [1] } },
  });
  await client.invalidateQueries();
  const figure = await screen.findByRole("figure", { name: "Reward" });
  await waitFor(() => {
    expect(figure).toHaveTextContent("from 0.1 at step 1 to 0.9 at step 4");
  });
  expect(requests.filter(({ url }) => url.includes("/curves")).every(({ url }) => url.includes("after=3"))).toBe(true);
});

it("opens the step that a reader chooses on a curve", async () => {
  const { user, router } = show();
  const slider = within(await screen.findByRole("figure", { name: "Reward" })).getByRole("slider");
  slider.focus();
  await user.keyboard("{Home}{ArrowRight}{Enter}");
  expect(router.state.location.pathname).toBe("/runs/r/steps/2");
});

it("keeps the shown metrics in the address", async () => {
  show(makeDetail(), "?more=loss");
  expect(await screen.findByRole("figure", { name: "loss" })).toBeVisible();
});

it("lists the settings, those first that differ, and finds them", async () => {
  const settings = { a: { same: 1 }, z: { other: 2 } };
  const { user } = show(makeDetail({ settings, changed: ["z.other"] }), "?tab=settings");
  const table = await screen.findByRole("table", { name: "Settings" });
  const rows = within(table).getAllByRole("row");
  expect(rows[1]).toHaveTextContent("z.other changed2");
  await user.type(screen.getByRole("searchbox"), "same");
  await waitFor(() => {
    expect(within(screen.getByRole("table", { name: "Settings" })).getAllByRole("row")).toHaveLength(2);
  });
});

it("shows warnings as texts", async () => {
  show(makeDetail({ warnings: [{ severity: "error", text: "<img src=x onerror=alert(1)>", step: 3 }] }));
  const warning = await screen.findByTestId("warning");
  expect(warning).toHaveTextContent("step 3: <img src=x onerror=alert(1)>");
  expect(warning.querySelector("img")).toBeNull();
});

it("says so before the first step", async () => {
  show(makeDetail({ groups: [], metrics: [] }));
  expect(await screen.findByTestId("empty")).toHaveTextContent("No step has been taken yet");
});

it("shows the sentence of the server where there is no such run", async () => {
  answer({ "GET /api/runs/r": Response.json({ detail: "run 'r' is not there: choose one" }, { status: 404 }) });
  renderAt(<RunPage />, { address: "/runs/r", path: "/runs/:run" });
  expect(await screen.findByRole("alert")).toHaveTextContent("run 'r' is not there: choose one");
});

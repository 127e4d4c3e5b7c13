import { screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import { answer, renderAt } from "../testing/render";
import { makeRun } from "../testing/samples";
import RunsPage from "./RunsPage";

const HOSTILE = "<img src=x onerror=alert(1)>";
const RUNS = [
  makeRun("new", { started: 200, is_latest: true, notes: { note: HOSTILE, tags: ["kl"] } }),
  makeRun("old", { started: 100, best_em: { mean: 0.42, low: 0.39, high: 0.46, count: 1200 }, best_label: "after" }),
  makeRun("torn", { state: "broken", problem: "settings.yaml cannot be read", started: null }),
];

function open(runs = RUNS, answers: Record<string, unknown> = {}) {
  const server = answer({ "GET /api/runs": { folder: "runs", runs }, ...answers });
  return { ...renderAt(<RunsPage />), ...server };
}
const row = (id: string) => {
  const found = screen.getByRole("link", { name: id }).closest("tr");
  if (found === null) throw new Error(`no row shows ${id}`);
  return within(found);
};

test("runs are shown with what is known, and what is not is a dash", async () => {
  open();
  expect(await screen.findByText("42.0 %")).toBeInTheDocument();
  expect(row("old").getByText("(39.0–46.0)")).toBeInTheDocument();
  expect(row("torn").getByText("settings.yaml cannot be read")).toBeInTheDocument();
  expect(row("torn").getAllByText("–").length).toBeGreaterThanOrEqual(3);
  expect(row("new").getByText("latest")).toBeInTheDocument();
});

test("a note is text, whatever is in it", async () => {
  const { container } = open();
  expect(await screen.findByText(HOSTILE)).toBeInTheDocument();
  expect(container.querySelector("img")).toBeNull();
});

test("two chosen runs are compared, the older one first", async () => {
  const { user, router } = open();
  await screen.findByText("42.0 %");
  expect(screen.getByRole("button", { name: "Compare 0 of 2" })).toBeDisabled();
  await user.click(screen.getByLabelText("Choose new for a comparison"));
  await user.click(screen.getByLabelText("Choose old for a comparison"));
  await user.click(screen.getByRole("button", { name: "Compare 2 of 2" }));
  expect(router.state.location).toMatchObject({ pathname: "/compare", search: "?a=old&b=new" });
});

test("runs are chosen with the keyboard too", async () => {
  const { user, router } = open();
  await screen.findByText("42.0 %");
  await user.keyboard("jxjxc");
  expect(router.state.location.search).toBe("?a=old&b=new");
});

test("a note is written where it is shown, and keeps the tags", async () => {
  const { user, requests } = open(RUNS, { "PUT /api/runs/new/notes": { note: "better", tags: ["kl"] } });
  await user.click(await screen.findByRole("button", { name: /Change the note of new/ }));
  const field = screen.getByRole("textbox", { name: /Note of new/ });
  expect(field).toHaveFocus();
  await user.clear(field);
  await user.type(field, "better");
  await user.tab();
  await waitFor(() => {
    expect(requests.some(({ method }) => method === "PUT")).toBe(true);
  });
  const written = requests.find(({ method }) => method === "PUT");
  expect(await written?.json()).toEqual({ note: "better", tags: ["kl"] });
});

test("Escape leaves a note as it was", async () => {
  const { user, requests } = open();
  await user.click(await screen.findByRole("button", { name: "+ note on old" }));
  await user.keyboard("oh{Escape}");
  expect(screen.getByRole("button", { name: "+ note on old" })).toBeInTheDocument();
  expect(requests.every(({ method }) => method === "GET")).toBe(true);
});

test("a note that the server refuses is taken back, and its sentence is shown", async () => {
  const refused = Response.json({ detail: "runs/old cannot be written to: check its owner" }, { status: 409 });
  const { user } = open(RUNS, { "PUT /api/runs/old/notes": refused });
  await user.click(await screen.findByRole("button", { name: "+ note on old" }));
  await user.keyboard("oh");
  await user.tab();
  expect(await screen.findByText(/cannot be written to: check its owner/)).toBeInTheDocument();
  await waitFor(() => {
    expect(screen.getByRole("button", { name: "+ note on old" })).toBeInTheDocument();
  });
});

test("tags are added and filter the list", async () => {
  const { user, router, requests } = open(RUNS, { "PUT /api/runs/old/notes": { note: "", tags: ["a b"] } });
  await user.click(await screen.findByRole("button", { name: "+ tag: change the tags of old" }));
  await user.keyboard(" a b {Enter}");
  await user.tab();
  await waitFor(() => {
    expect(requests.some(({ method }) => method === "PUT")).toBe(true);
  });
  expect(await requests.find(({ method }) => method === "PUT")?.json()).toEqual({ note: "", tags: ["a b"] });
  await user.click(screen.getByRole("button", { name: "Show the runs with the tag kl" }));
  expect(router.state.location.search).toBe("?tag=kl");
  expect(screen.queryByRole("link", { name: "old" })).toBeNull();
  await user.click(screen.getByRole("button", { name: /Show runs without the tag kl/ }));
  expect(screen.getByRole("link", { name: "old" })).toBeInTheDocument();
});

test("without runs the page says how to start one", async () => {
  open([]);
  expect(await screen.findByText("There is no run in runs")).toBeInTheDocument();
  expect(screen.getByText("make demo")).toBeInTheDocument();
});

test("an error is the sentence of the server, and can be tried again", async () => {
  const { user } = open(RUNS, { "GET /api/runs": Response.json({ detail: "runs is no folder" }, { status: 503 }) });
  expect(await screen.findByText("runs is no folder")).toBeInTheDocument();
  answer({ "GET /api/runs": { folder: "runs", runs: RUNS } });
  await user.click(screen.getByRole("button", { name: "Try again" }));
  expect(await screen.findByText("42.0 %")).toBeInTheDocument();
});

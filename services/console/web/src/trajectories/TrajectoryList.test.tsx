import { screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import TrajectoriesPage from "../pages/TrajectoriesPage";
import { answer, renderAt } from "../testing/render";
import { makeSample } from "../testing/trajectories";

const FACETS = {
  places: ["step-10", "step-20", "before"],
  sources: { facts: 300, maths: 200 },
  statuses: { OK: 498, TIMEOUT: 2 },
  reasons: { "a shard was down": 2 },
  steps: { low: 10, high: 20 },
  reward: { low: 0, high: 1 },
  searches: { low: 0, high: 3 },
  versions: { low: 8, high: 19 },
  all: 500,
};

function open(search = "", rows = [makeSample(), makeSample({ row: 9, em: 0, answer: "Birr", reward: 0.2 })]) {
  const served = answer({
    "GET /api/runs/demo/trajectories": { rows, total: rows.length, all: 500, seconds: 0.012, indexed: 0.5, loaded: 1 },
    "GET /api/runs/demo/facets": FACETS,
  });
  const view = renderAt(<TrajectoriesPage />, {
    path: "/runs/:run/trajectories",
    address: `/runs/demo/trajectories${search}`,
  });
  const asked = () =>
    served.requests.map(({ url }) => new URL(url)).findLast(({ pathname }) => pathname.endsWith("/trajectories"))
      ?.searchParams;
  return { ...served, ...view, asked, search: () => view.router.state.location.search };
}

test("the list shows what passed, and how long it took", async () => {
  const { asked } = open("?text=uganda&right=0&status=OK&status=TIMEOUT");
  expect(await screen.findByTestId("found")).toHaveTextContent(
    "2 of 500 trajectories in 12 ms · 50 % of the texts are indexed",
  );
  expect(screen.getAllByTestId("trajectory-row")[1]).toHaveTextContent(
    /Birr \(accepted: Ugandan Shilling\).*wrong.*0\.2/,
  );
  expect(asked()?.getAll("status")).toEqual(["OK", "TIMEOUT"]);
  expect(asked()?.get("right")).toBe("false");
});

test("chips take filters off, and the back button puts them on again", async () => {
  const { user, search, router } = open("?right=0&truncated=1");
  const chips = await screen.findByTestId("chips");
  await user.click(within(chips).getByRole("button", { name: "Remove the filter wrong" }));
  expect(search()).toBe("?truncated=1");
  await router.navigate(-1);
  expect(search()).toBe("?right=0&truncated=1");
  await user.click(await screen.findByRole("button", { name: "Clear all" }));
  expect(search()).toBe("");
});

test("a preset is a filter and an order", async () => {
  const { user, search } = open("?place=step-10");
  await user.click(await screen.findByTestId("presets"));
  await user.click(await screen.findByRole("menuitem", { name: "Searching reinforced most" }));
  expect(search()).toBe("?place=step-10&searches_min=1&sort=search_advantage");
});

test("a row opens its trajectory within the list, in the colours of the order", async () => {
  open("?sort=search_advantage");
  const rows = await screen.findAllByTestId("trajectory-row");
  expect(within(rows[1] as HTMLElement).getByRole("link")).toHaveAttribute(
    "href",
    "/runs/demo/trajectories/step-10/9?sort=search_advantage&colour=advantage&i=1",
  );
});

test("columns sort down, up, and not at all", async () => {
  const { user, search } = open();
  const header = await screen.findByRole("button", { name: "Reward" });
  await user.click(header);
  expect(search()).toBe("?sort=reward");
  expect(header.parentElement).toHaveAttribute("aria-sort", "descending");
  await user.click(header);
  expect(search()).toBe("?sort=reward&order=ascending");
  await user.click(header);
  expect(search()).toBe("");
});

test("j and k go through the rows", async () => {
  const { user } = open();
  const [first, second] = (await screen.findAllByTestId("trajectory-row")).map((row) => within(row).getByRole("link"));
  await user.keyboard("j");
  await waitFor(() => {
    expect(first).toHaveFocus();
  });
  await user.keyboard("j");
  await waitFor(() => {
    expect(second).toHaveFocus();
  });
  await user.keyboard("k");
  await waitFor(() => {
    expect(first).toHaveFocus();
  });
});

test("back from a trajectory, the list is where it was", async () => {
  open("?at=1");
  const rows = await screen.findAllByTestId("trajectory-row");
  await waitFor(() => {
    expect(within(rows[1] as HTMLElement).getByRole("link")).toHaveFocus();
  });
});

test("typing searches after a pause, and slash leads to the field", async () => {
  const { user, asked, search } = open();
  await screen.findByTestId("trajectory-list");
  await user.keyboard("/");
  await user.keyboard("kira lies");
  await waitFor(() => {
    expect(asked()?.get("text")).toBe("kira lies");
  });
  expect(search()).toBe("?text=kira+lies");
});

test("filters behind the button change the address", async () => {
  const { user, search } = open();
  await user.click(await screen.findByTestId("more-filters"));
  await user.selectOptions(await screen.findByLabelText("Answer"), "wrong");
  expect(search()).toBe("?right=0");
  await user.type(screen.getByLabelText("Reward, at least"), "0.5{Enter}");
  expect(search()).toBe("?right=0&reward_min=0.5");
  await user.type(screen.getByLabelText("Step, at most"), "abc{Enter}");
  expect(search()).toBe("?right=0&reward_min=0.5");
  await user.click(screen.getByLabelText("TIMEOUT (2)"));
  expect(search()).toContain("status=TIMEOUT");
  await user.click(screen.getByLabelText("TIMEOUT (2)"));
  expect(search()).toBe("?right=0&reward_min=0.5");
});

test("nothing found offers to clear the filter; nothing saved says which setting keeps trajectories", async () => {
  const { user, search, unmount } = open("?right=1", []);
  await user.click(await screen.findByRole("button", { name: "Clear the filter" }));
  expect(search()).toBe("");
  unmount();
  open("", []);
  expect(await screen.findByTestId("empty")).toHaveTextContent("trainer.rollout_data_freq");
});

test("the selection can be exported, of validations it cannot", async () => {
  const { unmount } = open("?right=1");
  expect(await screen.findByTestId("export")).toHaveAttribute("href", "/api/runs/demo/trajectories.parquet?right=true");
  unmount();
  open("?place=before");
  expect(await screen.findByTestId("export")).not.toHaveAttribute("href");
});

test("a snippet's words are marked, and stay text", async () => {
  open("?text=kira", [makeSample({ snippet: "<b>of Kira</b> lies" })]);
  const row = await screen.findByTestId("trajectory-row");
  expect(row.querySelector(".found")).toHaveTextContent("Kira");
  expect(row.querySelector("b")).toBeNull();
});

test("an error is the server's sentence", async () => {
  answer({ "GET /api/runs/demo/trajectories": Response.json({ detail: "step-10 is damaged" }, { status: 409 }) });
  renderAt(<TrajectoriesPage />, { path: "/runs/:run/trajectories", address: "/runs/demo/trajectories" });
  expect(await screen.findByText("step-10 is damaged")).toBeVisible();
});

import { screen, waitFor, within } from "@testing-library/react";
import { expect, test } from "vitest";
import type { Model } from "../api/client";
import { answer, renderAt } from "../testing/render";
import { makeRun } from "../testing/samples";
import ComparePage from "./ComparePage";

const HOSTILE = "<script>alert(1)</script>";

function makePair(number: number): Model<"QuestionPair"> {
  const side = (run: string, text: string | null) => ({
    run,
    place: "after",
    row: number,
    answer: text,
    em: text === null ? null : 1,
    reward: null,
  });
  return {
    uid: `nq/${number}`,
    question: `${HOSTILE} ${number}`,
    targets: ["Luanda"],
    data_source: "nq",
    outcome: "won",
    a: side("one", null),
    b: side("two", "Luanda"),
  };
}

function makeComparison(values: Partial<Model<"RunComparison">> = {}): Model<"RunComparison"> {
  return {
    a: makeRun("one"),
    b: makeRun("two"),
    settings: [{ name: "trainer.lr", a: 1e-6, b: null }],
    metrics: ["reward_mean"],
    labels_a: ["before", "after"],
    labels_b: ["before", "after"],
    label_a: "after",
    label_b: "after",
    sources: [
      {
        data_source: "nq",
        questions: 3,
        em_a: 0.25,
        em_b: 0.5,
        difference: { mean: 0.25, low: 0.1, high: 0.4, p: 0.0002 },
        outcomes: { won: 3, lost: 1 },
      },
    ],
    pairs: [makePair(0), makePair(1)],
    total: 2,
    only_a: 7,
    only_b: 0,
    digests_equal: null,
    first_difference: null,
    ...values,
  };
}

const CURVES = { steps: [1, 2], time: [null, null], columns: { reward_mean: [0.1, 0.2] } };

function open(comparison: unknown = makeComparison(), address = "/compare?a=one&b=two") {
  const server = answer({
    "GET /api/runs": { folder: "runs", runs: [makeRun("one"), makeRun("two")] },
    "GET /api/compare": comparison,
    "GET /api/runs/one/curves": CURVES,
    "GET /api/runs/two/curves": { ...CURVES, columns: { reward_mean: [0.3, null] } },
  });
  return { ...renderAt(<ComparePage />, { address, path: "/compare" }), ...server };
}
const asked = (requests: Request[]) =>
  requests.map(({ url }) => new URL(url)).filter(({ pathname }) => pathname === "/api/compare");

test("settings, curves and questions of both runs are beside each other", async () => {
  open();
  const settings = await screen.findByRole("table", { name: "Settings that differ" });
  expect(
    within(settings)
      .getAllByRole("cell")
      .map((cell) => cell.textContent),
  ).toEqual(["trainer.lr", "0.000001", "–"]);
  const curve = await screen.findByRole("slider", { name: /reward_mean/ });
  expect(curve).toHaveAttribute("aria-valuetext", "step 2: A 0.2, B –");
  const sources = screen.getByRole("table", { name: "Exact match by data source" });
  expect(within(sources).getByText("+25.0")).toBeInTheDocument();
  expect(within(sources).getByText("(+10.0 to +40.0, p < 0.001)")).toBeInTheDocument();
  expect(screen.getByText(/7 questions that only A answered/)).toBeInTheDocument();
});

test("answers lead to both trajectories, and texts are texts", async () => {
  const { container } = open();
  const [right] = await screen.findAllByRole("link", { name: "Luanda" });
  expect(right).toHaveAttribute("href", "/runs/two/trajectories/after/0");
  const [none] = screen.getAllByRole("link", { name: "no answer" });
  expect(none).toHaveAttribute("href", "/runs/one/trajectories/after/0");
  expect(screen.getByText(`${HOSTILE} 0`)).toBeInTheDocument();
  expect(container.querySelector("script")).toBeNull();
});

test("filters are in the address and in what the server is asked for", async () => {
  const { user, router, requests } = open();
  await user.click(await screen.findByRole("radio", { name: "lost" }));
  await user.type(screen.getByRole("searchbox", { name: "Search questions" }), "capital");
  await waitFor(() => {
    expect(router.state.location.search).toBe("?a=one&b=two&outcome=lost&text=capital");
  });
  await waitFor(() => {
    expect(asked(requests).at(-1)?.search).toContain("outcome=lost&source=&text=capital");
  });
});

test("more questions are fetched from where the first end", async () => {
  const { requests } = open(({ url }: Request) => {
    const offset = Number(new URL(url).searchParams.get("offset"));
    return makeComparison({ total: 250, pairs: [makePair(offset), makePair(offset + 1)] });
  });
  await waitFor(() => {
    expect(asked(requests).map(({ searchParams }) => searchParams.get("offset"))).toContain("100");
  });
});

test("another run starts with its own validations", async () => {
  const { user, router } = open(makeComparison(), "/compare?a=one&b=two&label_a=before&outcome=won");
  await user.click(await screen.findByRole("button", { name: "Swap A and B" }));
  expect(router.state.location.search).toBe("?a=two&b=one&outcome=won");
});

test("without two runs nothing is asked for", async () => {
  const { requests } = open(makeComparison(), "/compare?a=one");
  expect(await screen.findByText("Choose two runs")).toBeInTheDocument();
  expect(asked(requests)).toEqual([]);
});

test("runs without a validation in common say what is needed", async () => {
  open(makeComparison({ sources: [], pairs: [], total: 0, metrics: [], settings: [], digests_equal: true }));
  expect(await screen.findByText(/No validation of A/)).toBeInTheDocument();
  expect(screen.getByText("The runs have no metric in common")).toBeInTheDocument();
  expect(screen.getByText("Both runs have the same settings.")).toBeInTheDocument();
  expect(screen.getByText(/equal to the bit/)).toBeInTheDocument();
});

test("a run that is not there is named", async () => {
  open(Response.json({ detail: "there is no run two in runs" }, { status: 404 }));
  expect(await screen.findByText("there is no run two in runs")).toBeInTheDocument();
});

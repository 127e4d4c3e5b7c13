import { screen, waitFor, within } from "@testing-library/react";
import { expect, test, vi } from "vitest";
import TrajectoryPage from "../pages/TrajectoryPage";
import { answer, renderAt } from "../testing/render";
import { makeDetail, makeSample } from "../testing/trajectories";
import type { Detail } from "./layout";
import { findNextStrongest, nameQuestion } from "./TrajectoryView";

const HERE = "/api/runs/demo/trajectories/step-10/8";

function open(detail: Detail, search = "", answers: Record<string, unknown> = {}) {
  const rows = [makeSample(), makeSample({ row: 9, sample: 1, reward: 0.2, em: 0, answer: "Birr", advantage: -1.62 })];
  const served = answer({
    [`GET ${HERE}`]: detail,
    "GET /api/runs/demo/trajectories": { rows, total: 2, all: 2, seconds: 0, indexed: 1, loaded: 1 },
    ...answers,
  });
  const view = renderAt(<TrajectoryPage />, {
    path: "/runs/:run/trajectories/:place/:row",
    address: `/runs/demo/trajectories/step-10/8${search}`,
  });
  return { ...served, ...view, search: () => view.router.state.location.search };
}

const token = (number: number) => document.querySelector(`[data-token="${number}"]`);

test("a trajectory shows its question, answer, conversation and why it was reinforced", async () => {
  open(makeDetail());
  expect(await screen.findByRole("heading", { level: 1, name: "What is the currency of Uganda?" })).toBeVisible();
  expect(screen.getByTestId("summary")).toHaveTextContent(/right.*Ugandan Shilling.*reward 1.*step 10/);
  expect(screen.getByTestId("passage")).toHaveTextContent(/Uganda.*score 0\.115.*world-00227.*has the answer/);
  expect(
    await screen.findByText(/Its search was reinforced: mean advantage \+1\.62\..* 1 got 1 and 1 got 0\.2/),
  ).toBeVisible();
  expect(within(screen.getByTestId("group-strip")).getAllByRole("listitem")).toHaveLength(2);
  expect(screen.getByTestId("reward")).toHaveTextContent(/exact_match.*\+1/);
  expect(screen.getByTestId("timings")).toHaveTextContent(/retrieve.*0\.50 s/);
});

test("number keys choose what colours mean, in the address too", async () => {
  const { user, search } = open(makeDetail());
  await screen.findByTestId("conversation");
  expect(token(0)).toHaveClass("tag", { exact: true });
  await user.keyboard("2");
  expect(token(0)).toHaveClass("plus-8");
  expect(search()).toContain("colour=advantage");
  await user.keyboard("6");
  expect(token(1)).toHaveClass("plus-8");
  expect(token(0)).toHaveClass("zero");
  await user.keyboard("o");
  await user.keyboard("3");
  expect(token(4)).toHaveClass("off");
});

test("a mode without values cannot be chosen, by address neither", async () => {
  const { user, search } = open(makeDetail(), "?colour=entropy");
  const entropy = await screen.findByRole("radio", { name: /Entropy/ });
  expect(entropy).toBeDisabled();
  expect(screen.getByRole("radio", { name: /Author/ })).toBeChecked();
  await user.keyboard("8");
  expect(search()).toBe("?colour=entropy");
  expect(screen.getByRole("radio", { name: /Author/ })).toBeChecked();
});

test("keys walk over the tokens, and the panel has all numbers of each", async () => {
  const { user, search } = open(makeDetail());
  await screen.findByTestId("conversation");
  const panel = screen.getByTestId("token-panel");
  await user.keyboard("ll");
  expect(within(panel).getByTestId("token-text")).toHaveTextContent("␣Uganda");
  const fact = (name: string) => panel.querySelector(`[data-fact="${name}"]`)?.textContent;
  expect(fact("advantage")).toBe("+1.62");
  expect(fact("policy version")).toBe("8, staleness 1");
  expect(fact("log-prob, trainer")).toBe("-0.7");
  expect(fact("log-prob, engine")).toBe("-0.71");
  expect(fact("mismatch")).toBe("+0.01");
  expect(fact("probability")).toBe("49.66 %");
  expect(fact("KL")).toBe("–");
  await waitFor(() => {
    expect(search()).toContain("token=1");
  });
  expect(token(1)).toHaveClass("active");
  await user.keyboard("h");
  expect(token(0)).toHaveClass("active");
  expect(token(1)).not.toHaveClass("active");
  await user.keyboard("{Escape}");
  await waitFor(() => {
    expect(search()).toBe("");
  });
  expect(document.querySelector(".active")).toBeNull();
});

test("walking skips what is shown as passages, and ends at the ends", async () => {
  const { user } = open(makeDetail());
  await screen.findByTestId("conversation");
  const walked = [];
  for (const key of "llllllllhh") {
    await user.keyboard(key);
    walked.push(document.querySelector(".active")?.getAttribute("data-token"));
  }
  expect(walked).toEqual(["0", "1", "2", "6", "7", "8", "8", "8", "7", "6"]);
  await user.keyboard("{Escape}oh");
  await user.keyboard("hhhh");
  expect(document.querySelector(".active")).toHaveAttribute("data-token", "4");
});

test("a press keeps a token, the pointer shows one", async () => {
  const { user } = open(makeDetail());
  await screen.findByTestId("conversation");
  await user.hover(token(2) as Element);
  expect(screen.getByTestId("token-text")).toHaveTextContent("␣</search>");
  await user.click(token(8) as Element);
  await user.hover(token(2) as Element);
  expect(screen.getByTestId("token-text")).toHaveTextContent("␣Shilling");
});

test("the strongest token is found, then the next one", async () => {
  const { user } = open(makeDetail(), "?colour=surprise");
  await screen.findByTestId("conversation");
  const order = [];
  for (let place = 0; place < 3; place += 1) {
    await user.keyboard("e");
    order.push(document.querySelector(".active")?.getAttribute("data-token"));
  }
  expect(order).toEqual(["1", "7", "6"]);
});

test.each([
  [null, null, null],
  [[null, null], null, null],
  [[1, -3, 2], null, 1],
  [[1, -3, 2], 1, 2],
  [[1, -3, 2], 0, 1],
  [[5, 5], 0, 1],
  [[5, 5], 1, 0],
])("of %j after %j the strongest is %j", (values, shown, expected) => {
  expect(findNextStrongest(values, shown)).toBe(expected);
});

test("texts are text, whatever they say", async () => {
  const hostile = `<img src=x onerror="window.hacked=1"><script>window.hacked=1</script>`;
  const detail = makeDetail({ prompt: hostile }, { text: [hostile, ...Array<string>(8).fill("<b>x</b>\n")] });
  detail.summary = makeSample({ question: hostile, answer: hostile, targets: [hostile], reason: hostile });
  detail.turns = detail.turns.map((turn) => ({
    ...turn,
    tag: hostile,
    passages: [{ id: hostile, title: hostile, text: hostile, score: 1, gold: true }],
  }));
  detail.judgement = { ...detail.judgement, detail: hostile, components: [{ name: hostile, raw: 1, weighted: 1 }] };
  open(detail, "?find=img");
  await screen.findByTestId("conversation");
  expect(document.querySelector("img, script, b > b")).toBeNull();
  expect(screen.getByTestId("conversation")).toHaveTextContent(`<script>window.hacked=1</script>`);
  expect(window).not.toHaveProperty("hacked");
});

test("a validation has its text, and says that nothing was trained on it", async () => {
  const detail = makeDetail({ tokens: null, step_version: null, timings: null, estimator: null, group: [] });
  detail.summary = makeSample({
    step: null,
    place: "step-10",
    trained: null,
    advantage: null,
    search_advantage: null,
    versions: null,
    tokens: null,
  });
  open(detail, "?colour=advantage");
  expect(await screen.findByTestId("why")).toHaveTextContent("a validation only measures");
  expect(screen.queryByTestId("token-panel")).toBeNull();
  expect(screen.getByTestId("conversation")).toHaveTextContent("<search> Uganda </search>");
});

test("a trajectory that failed before its first token says why", async () => {
  const detail = makeDetail({ blocks: [], tokens: null, turns: [], timings: null, group: [] });
  detail.summary = makeSample({
    status: "TIMEOUT",
    reason: "no engine answered",
    answer: null,
    reward: null,
    em: null,
    trained: false,
    advantage: null,
    search_advantage: null,
    searches: 0,
    versions: null,
  });
  detail.judgement = { ...detail.judgement, total: null, status: "TIMEOUT", components: [], detail: "" };
  open(detail);
  expect(await screen.findByTestId("empty")).toHaveTextContent("The policy wrote nothing" + "no engine answered");
  expect(screen.getByTestId("why")).toHaveTextContent("the step did not train on this trajectory (no engine answered)");
  expect(screen.getByTestId("summary")).toHaveTextContent(/no answer.*reward –.*TIMEOUT/);
});

test("what is looked for is marked and counted, in what the policy read too", async () => {
  const { user } = open(makeDetail(), "?observations=0");
  await screen.findByTestId("conversation");
  await user.keyboard("/");
  await user.keyboard("ugandan shilling");
  await waitFor(() => {
    expect([...document.querySelectorAll(".found")].map((found) => found.textContent)).toEqual([
      "Ugandan Shilling",
      "Ugandan",
      " Shilling",
    ]);
  });
  expect(screen.getByTestId("find")).toHaveTextContent("2");
});

test("the explanation is asked for only when it is wanted", async () => {
  const { user, requests } = open(makeDetail(), "", {
    [`GET ${HERE}/explanation`]: { text: "the answer equals an accepted one", is_live: true },
  });
  await screen.findByTestId("reward");
  const asked = () => requests.filter(({ url }) => url.endsWith("/explanation")).length;
  expect(asked()).toBe(0);
  await user.click(screen.getByRole("button", { name: "Explain this reward" }));
  expect(await screen.findByTestId("explanation")).toHaveTextContent(
    /equals an accepted one.*By the reward service of this run/,
  );
  expect(asked()).toBe(1);
});

test("a replay says what changed, and its failure says why", async () => {
  const detail = makeDetail();
  const blocks = structuredClone(detail.blocks);
  const last = blocks.at(-1)?.pieces.at(-1);
  if (last) last.text = " Birr";
  const { user } = open(detail, "", {
    [`POST ${HERE}/replay`]: {
      kind: "sample",
      version: 40,
      stored: detail.judgement,
      new: { ...detail.judgement, total: 0.2, detail: "wrong answer" },
      changed: [{ name: "exact_match", raw: 0, weighted: 0 }],
      divergence: "turn 2",
      blocks,
      is_repeatable: false,
    },
  });
  await user.click(await screen.findByRole("button", { name: "Sample again" }));
  const result = await screen.findByTestId("replay-result");
  expect(result).toHaveTextContent("Sampled again by version 40: reward 1 → 0.2");
  expect(result).toHaveTextContent("exact_match: 1 → 0");
  expect(result).toHaveTextContent("diverge at turn 2; it was sampled without a seed");
  expect(result.querySelector("ins")).toHaveTextContent("Birr");
  answer({ [`POST ${HERE}/replay`]: Response.json({ detail: "the reward service does not answer" }, { status: 503 }) });
  await user.click(screen.getByRole("button", { name: "Score again" }));
  expect(await screen.findByText("the reward service does not answer")).toBeVisible();
});

test("j and k go through the list that the reader came from", async () => {
  const list = {
    rows: [
      ...Array.from({ length: 6 }, (_, row) => makeSample({ row: 100 + row })),
      makeSample({ row: 3 }),
      makeSample(),
      makeSample({ place: "step-40", row: 5 }),
    ],
    total: 418,
    all: 512,
    seconds: 0,
    indexed: 1,
    loaded: 1,
  };
  const { user, router, requests } = open(makeDetail(), "?sort=search_advantage&i=7&token=3", {
    "GET /api/runs/demo/trajectories": list,
  });
  expect(await screen.findByText("8 of 418")).toBeVisible();
  const asked = requests.map(({ url }) => new URL(url)).find(({ searchParams }) => searchParams.get("limit") === "52");
  expect(asked?.searchParams.get("sort")).toBe("search_advantage");
  expect(asked?.searchParams.get("offset")).toBe("0");
  expect(screen.getByRole("link", { name: "Trajectories" })).toHaveAttribute(
    "href",
    "/runs/demo/trajectories?sort=search_advantage&at=7",
  );
  await user.keyboard("j");
  expect(router.state.location.pathname).toBe("/runs/demo/trajectories/step-40/5");
  expect(router.state.location.search).toBe("?sort=search_advantage&i=8");
});

test("without a list, j and k go through the file", async () => {
  const { user, router } = open(makeDetail(), "?colour=mask");
  await screen.findByTestId("conversation");
  await user.keyboard("k");
  expect(router.state.location.pathname + router.state.location.search).toBe(
    "/runs/demo/trajectories/step-10/7?colour=mask",
  );
});

test("a trajectory that is not there says so", async () => {
  open(makeDetail(), "", { [`GET ${HERE}`]: Response.json({ detail: "step-10 has no row 8" }, { status: 404 }) });
  expect(await screen.findByRole("alert")).toHaveTextContent("step-10 has no row 8");
});

test("of a long trajectory only what is in sight is in the document", async () => {
  const count = 32_000;
  const text = Array.from({ length: count }, (_, n) => (n % 20 === 19 ? " word\n" : " word"));
  const numbers = Array<number>(count).fill(1);
  const detail = makeDetail(
    {
      blocks: [
        {
          author: "model",
          begin: 0,
          end: count,
          turn: 1,
          pieces: [{ text: text.join(""), within: "", is_tag: false }],
        },
      ],
    },
    { text, id: numbers, mask: numbers, turn: numbers, version: numbers, advantage: numbers },
  );
  // jsdom lays nothing out: without heights all rows would fit into the window.
  vi.spyOn(HTMLElement.prototype, "offsetHeight", "get").mockReturnValue(60);
  open(detail);
  await screen.findByTestId("conversation");
  const drawn = document.querySelectorAll("[data-token]").length;
  expect(drawn).toBeGreaterThan(0);
  expect(drawn).toBeLessThan(5000);
});

test("a question is named by its group without the epoch", () => {
  expect(nameQuestion("facts/train/7/0")).toBe("facts/train/7");
  expect(nameQuestion("odd")).toBe("odd");
});

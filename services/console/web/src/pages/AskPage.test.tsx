import { screen, waitFor } from "@testing-library/react";
import { beforeEach, expect, it, vi } from "vitest";
import type { AskEvent } from "../ask/stream";
import { renderAt } from "../testing/render";
import AskPage from "./AskPage";

const READY = { is_ready: true, problem: null, version: 12, environments: ["plain"] };
const encoder = new TextEncoder();

function makeEvent(changes: Partial<AskEvent>): AskEvent {
  return { kind: "turn", turn: null, text: "", answer: null, judgement: null, version: 12, ...changes };
}

/** A server whose answer is written by the test. */
function serve(status: unknown = READY) {
  const asked: unknown[] = [];
  let stream!: ReadableStreamDefaultController<Uint8Array<ArrayBuffer>>;
  let signal: AbortSignal | null | undefined;
  const reply: typeof fetch = async (_, init) => {
    if (init?.method !== "POST") return Promise.resolve(Response.json(status));
    asked.push(JSON.parse(init.body as string));
    signal = init.signal;
    const body = new ReadableStream<Uint8Array<ArrayBuffer>>({ start: (controller) => void (stream = controller) });
    signal?.addEventListener("abort", () => {
      stream.error(new DOMException("aborted", "AbortError"));
    });
    return Promise.resolve(new Response(body));
  };
  vi.stubGlobal("fetch", reply);
  return {
    asked,
    isAborted: () => signal?.aborted === true,
    send: (changes: Partial<AskEvent>) => {
      stream.enqueue(encoder.encode(`data: ${JSON.stringify(makeEvent(changes))}\n\n`));
    },
    close: () => {
      stream.close();
    },
  };
}

function show(search = "") {
  return renderAt(<AskPage />, { address: `/runs/r/ask${search}`, path: "/runs/:run/ask" });
}

beforeEach(() => {
  sessionStorage.clear();
});

it("asks what the address says, and shows turns as they come, as texts", async () => {
  const server = serve();
  const { user } = show("?question=Where%20is%20Kima%3F&temperature=0.5");
  expect(await screen.findByRole("textbox", { name: "Question" })).toHaveValue("Where is Kima?");
  await user.click(screen.getByTestId("ask-submit"));
  await waitFor(() => {
    expect(server.asked).toEqual([{ question: "Where is Kima?", temperature: 0.5, environment: "" }]);
  });
  server.send({ text: "<search> Kima </search><img src=x onerror=alert(1)>" });
  const turn = await screen.findByTestId("ask-turn");
  expect(turn).toHaveTextContent("<search> Kima </search><img src=x onerror=alert(1)>");
  expect(turn.querySelector("img")).toBeNull();
  expect(screen.getByTestId("exchange")).toHaveAttribute("data-state", "asking");
  server.send({ kind: "end", answer: "Angola" });
  server.close();
  expect(await screen.findByTestId("ask-end")).toHaveTextContent("Answer: Angola");
});

it("stops", async () => {
  const server = serve();
  const { user } = show();
  await user.type(await screen.findByRole("textbox", { name: "Question" }), "Why?{Enter}");
  await user.click(await screen.findByTestId("ask-stop"));
  expect(await screen.findByTestId("ask-stopped")).toBeVisible();
  expect(server.isAborted()).toBe(true);
});

it("says why an answer failed, and when it broke off", async () => {
  const server = serve();
  const { user } = show();
  const field = await screen.findByRole("textbox", { name: "Question" });
  await user.type(field, "Why?{Enter}");
  await waitFor(() => {
    expect(server.asked).toHaveLength(1);
  });
  server.send({ kind: "error", text: "the rollout does not answer" });
  server.close();
  expect(await screen.findByTestId("ask-failed")).toHaveTextContent("the rollout does not answer");
  await user.type(field, "{Enter}");
  await waitFor(() => {
    expect(server.asked).toHaveLength(2);
  });
  server.close();
  await waitFor(() => {
    expect(screen.getAllByTestId("ask-failed")[0]).toHaveTextContent("broke before the answer was complete");
  });
});

it("remembers what was asked in this session", async () => {
  const server = serve();
  const { user, unmount } = show();
  await user.type(await screen.findByRole("textbox", { name: "Question" }), "Why?{Enter}");
  await waitFor(() => {
    expect(server.asked).toHaveLength(1);
  });
  unmount();
  show();
  const exchange = await screen.findByTestId("exchange");
  expect(exchange).toHaveTextContent("Why?");
  expect(exchange).toHaveAttribute("data-state", "stopped");
});

it("says why the policy cannot be asked", async () => {
  serve({ ...READY, is_ready: false, problem: "the run has ended: start it again", version: null });
  show("?question=Why%3F");
  expect(await screen.findByTestId("ask-not-ready")).toHaveTextContent("the run has ended: start it again");
  expect(screen.getByTestId("ask-submit")).toBeDisabled();
});

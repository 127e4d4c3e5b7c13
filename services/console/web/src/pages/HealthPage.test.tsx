import { screen, waitFor } from "@testing-library/react";
import { expect, it, vi } from "vitest";
import type { Model } from "../api/client";
import { answer, renderAt } from "../testing/render";
import HealthPage from "./HealthPage";

function makeService(changes: Partial<Model<"ServiceRow">>): Model<"ServiceRow"> {
  return {
    name: "trainer",
    state: "ready",
    address: "127.0.0.1:1",
    waiting_for: {},
    notes: [],
    waits: [],
    restarts: 0,
    log: [],
    ...changes,
  };
}

function makeHealth(changes: Partial<Model<"HealthDetail">> = {}): Model<"HealthDetail"> {
  return {
    checked: 1_700_000_000,
    is_reachable: true,
    problem: null,
    services: [makeService({})],
    version: 12,
    epoch: 1,
    replicas: [{ name: "engine-0", version: 11, epoch: 1, text: "loads", is_out_of_service: true }],
    queues: [{ name: "groups", entries: 5, bytes: null }],
    redis: { used_bytes: 300e6, max_bytes: 1e9, policy: "noeviction", clients: 3 },
    ...changes,
  };
}

function show(health: Model<"HealthDetail">) {
  answer({ "GET /api/runs/r/health": health });
  return renderAt(<HealthPage />, { address: "/runs/r/health", path: "/runs/:run/health" });
}

it("says what a service waits for, until when, and what it wrote last, as texts", async () => {
  const wait = {
    what: "groups of step 12",
    on: "rollout",
    detail: "3 of 16",
    waited_s: 30,
    gives_up_in_s: 570,
    why_unlimited: null,
    is_idle: false,
    count: 2,
  };
  show(makeHealth({ services: [makeService({ waits: [wait], log: ["<b>loaded</b>"], restarts: 2 })] }));
  expect(await screen.findByTestId("wait")).toHaveTextContent(
    /waits: groups of step 12 from rollout \(2 times\) – 3 of 16/,
  );
  expect(screen.getByTestId("wait")).toHaveTextContent(/gives up in 9 min/);
  expect(screen.getByTestId("service")).toHaveTextContent("2 restarts");
  expect(screen.getByRole("region", { name: "Log of trainer", hidden: true })).toHaveTextContent("<b>loaded</b>");
});

it("shows engines, queues and memory", async () => {
  show(makeHealth());
  expect(await screen.findByTestId("replicas")).toHaveTextContent("engine-011 (1 behind)out of serviceloads");
  expect(screen.getByTestId("queues")).toHaveTextContent("300 MB of 1 GB (30 %)");
  expect(screen.getByTestId("queues")).toHaveTextContent("groups5–");
});

it("is calm about a run that has ended", async () => {
  const services = [makeService({ state: "silent" })];
  show(makeHealth({ is_reachable: false, problem: "the run ended at noon", services, replicas: [], redis: null }));
  expect(await screen.findByTestId("health-over")).toHaveTextContent("the run ended at noon");
  expect(screen.getByText("silent").closest(".tone")).toHaveClass("tone-calm");
  expect(screen.queryByTestId("queues")).toBeNull();
});

it("says how late a service answers, which is no alarm", async () => {
  show(makeHealth({ services: [makeService({ state: "slow", notes: ["slow: answered after 3.2 s"] })] }));
  expect((await screen.findByText("slow")).closest(".tone")).toHaveClass("tone-warn");
  expect(screen.getByTestId("service")).toHaveTextContent("slow: answered after 3.2 s");
});

it("reads anew every two seconds, but not while it is hidden", async () => {
  vi.useFakeTimers({ shouldAdvanceTime: true });
  try {
    const { requests } = answer({ "GET /api/runs/r/health": makeHealth() });
    renderAt(<HealthPage />, { address: "/runs/r/health", path: "/runs/:run/health" });
    await screen.findByTestId("service");
    await vi.advanceTimersByTimeAsync(4_500);
    const visible = requests.length;
    expect(visible).toBeGreaterThanOrEqual(3);
    vi.spyOn(document, "visibilityState", "get").mockReturnValue("hidden");
    document.dispatchEvent(new Event("visibilitychange", { bubbles: true }));
    await vi.advanceTimersByTimeAsync(10_000);
    expect(requests.length).toBeLessThanOrEqual(visible + 1);
    vi.spyOn(document, "visibilityState", "get").mockReturnValue("visible");
    document.dispatchEvent(new Event("visibilitychange", { bubbles: true }));
    await waitFor(() => {
      expect(requests.length).toBeGreaterThan(visible + 1);
    });
  } finally {
    vi.useRealTimers();
  }
});

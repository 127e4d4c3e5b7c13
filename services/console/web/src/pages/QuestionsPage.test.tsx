import { screen, waitFor } from "@testing-library/react";
import { expect, it } from "vitest";
import { answer, renderAt } from "../testing/render";
import { makeDetail, makePoint } from "../testing/samples";
import QuestionsPage from "./QuestionsPage";

const row = {
  uid: "nq/1",
  question: "What is the capital of Angola?",
  targets: ["Luanda"],
  data_source: "nq",
  is_watched: true,
  points: [makePoint(), makePoint({ place: "after", step: 40, em: 1, answer: "Luanda" })],
  changes: 1,
};

function show(rows: unknown[], search = "") {
  const { requests } = answer({
    "GET /api/runs/r/questions": { rows, total: rows.length },
    "GET /api/runs/r": makeDetail(),
  });
  return {
    requests,
    ...renderAt(<QuestionsPage />, { address: `/runs/r/questions${search}`, path: "/runs/:run/questions" }),
  };
}

it("shows how each question was answered over time", async () => {
  show([row]);
  const link = await screen.findByRole("link", { name: row.question });
  expect(link).toHaveAttribute("href", "/runs/r/questions/nq%2F1");
  expect(screen.getByRole("img", { name: "exact match at step 0: 0 %, step 40: 100 %" })).toBeVisible();
  expect(screen.getByText("watched")).toBeVisible();
  expect(screen.getByTestId("question-total")).toHaveTextContent("1 question");
});

it("asks the server for what is in the address", async () => {
  const { requests, user, router } = show([row], "?changed=1");
  await screen.findByRole("link", { name: row.question });
  await user.click(screen.getByRole("switch", { name: "Only watched" }));
  await waitFor(() => {
    expect(requests.at(-1)?.url).toContain("watched=true");
  });
  expect(requests.at(-1)?.url).toContain("changed=true");
  expect(router.state.location.search).toBe("?changed=1&watched=1");
});

it("says what to do where there is nothing", async () => {
  show([]);
  expect(await screen.findByTestId("empty")).toHaveTextContent("No held-out question was asked yet");
});

it("says that the filter keeps nothing", async () => {
  show([], "?text=zzz");
  expect(await screen.findByTestId("empty")).toHaveTextContent("No question passes the filter");
});

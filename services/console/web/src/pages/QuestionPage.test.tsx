import { screen, waitFor, within } from "@testing-library/react";
import { expect, it } from "vitest";
import { answer, renderAt } from "../testing/render";
import { makeBlock, makePoint } from "../testing/samples";
import QuestionPage from "./QuestionPage";

const points = [
  makePoint(),
  makePoint({ place: "step-20", step: 20, answer: "Rome" }),
  makePoint({ place: "after", step: 40, em: 1, answer: "Luanda" }),
];
const texts = ["I know: Paris", "I know: <script>alert(1)</script> Rome", "I looked it up: Luanda"];
const detail = {
  question: {
    uid: "nq/1",
    question: "What is the capital of Angola?",
    targets: ["Luanda"],
    data_source: "nq",
    is_watched: false,
    points,
    changes: 1,
  },
  texts: points.map((point, index) => ({
    point,
    blocks: [makeBlock("prompt", "The prompt"), makeBlock("model", texts[index] ?? "")],
  })),
  em: null,
};

function show(search = "") {
  answer({ "GET /api/runs/r/questions/nq%2F1": detail });
  const address = `/runs/r/questions/nq%2F1${search}`;
  return renderAt(<QuestionPage />, { address, path: "/runs/:run/questions/:uid" });
}

const read = (label: string) => screen.getByRole("region", { name: label });

it("compares the last answer with the latest that was judged otherwise", async () => {
  show();
  expect(await screen.findByTestId("side-A")).toHaveTextContent("step 20answer Rome");
  expect(screen.getByTestId("side-B")).toHaveTextContent("step 40answer Luanda");
  expect(within(read("Newer text")).getByText("up: Luanda").tagName).toBe("INS");
  expect(read("Older text")).not.toHaveTextContent("The prompt");
});

it("shows what was written as texts", async () => {
  show();
  await screen.findByTestId("diff");
  expect(read("Older text")).toHaveTextContent("<script>alert(1)</script>");
  expect(read("Older text").querySelector("script")).toBeNull();
});

it("moves through the appearances with the arrow keys, and keeps both in the address", async () => {
  const { user, router } = show();
  await screen.findByTestId("diff");
  await user.keyboard("{Shift>}{ArrowLeft}{/Shift}");
  expect(router.state.location.search).toBe("?a=before.0&b=after.0");
  await user.keyboard("{ArrowLeft}{ArrowLeft}{ArrowLeft}");
  expect(router.state.location.search).toBe("?a=before.0&b=before.0");
  await waitFor(() => {
    expect(screen.getByTestId("diff")).toHaveTextContent("The texts are equal.");
  });
});

it("chooses an appearance of the strip", async () => {
  const { user, router } = show("?a=before.0&b=after.0");
  const strip = await screen.findByTestId("strip");
  await user.click(within(strip).getByRole("button", { name: /step 20/ }));
  expect(router.state.location.search).toBe("?a=before.0&b=step-20.0");
});

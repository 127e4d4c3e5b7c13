import { screen } from "@testing-library/react";
import { expect, test } from "vitest";
import { renderAt } from "../testing/render";
import { asFlag, asList, asNumber, asOneOf, asText, useSearchParam, useSetSearch } from "./searchParams";

const asMode = asOneOf(["mask", "advantage"]);
const NONE: string[] = [];

function Probe() {
  const [step, setStep] = useSearchParam("step", asNumber, 5);
  const [mode, setMode] = useSearchParam("mode", asMode, "mask", { push: true });
  const [sources] = useSearchParam("source", asList, NONE);
  const [isOn] = useSearchParam("on", asFlag, true);
  const [text, setText] = useSearchParam("text", asText, "");
  const set = useSetSearch();
  return (
    <>
      <output>{JSON.stringify([step, mode, sources, isOn, text])}</output>
      <button
        onClick={() => {
          setStep(7);
        }}
      >
        seven
      </button>
      <button
        onClick={() => {
          setStep(5);
        }}
      >
        default
      </button>
      <button
        onClick={() => {
          setMode("advantage");
        }}
      >
        advantage
      </button>
      <button
        onClick={() => {
          setStep(9);
          setText("a&b=c");
        }}
      >
        both
      </button>
      <button
        onClick={() => {
          set({ step: null, mode: null, text: "x" });
        }}
      >
        several
      </button>
    </>
  );
}

function read(): unknown {
  return JSON.parse(screen.getByRole("status").textContent);
}

test("values come from the address, and those that are none are the default", () => {
  renderAt(<Probe />, { address: "/?step=abc&mode=nonsense&source=nq,,hotpotqa&on=0" });
  expect(read()).toEqual([5, "mask", ["nq", "hotpotqa"], false, ""]);
});

test("an empty number is no 0", () => {
  renderAt(<Probe />, { address: "/?step=" });
  expect(read()).toEqual([5, "mask", [], true, ""]);
});

test("the default is not written into the address, and other values stay", async () => {
  const { user, router } = renderAt(<Probe />, { address: "/?other=1" });
  await user.click(screen.getByText("seven"));
  expect(router.state.location.search).toBe("?other=1&step=7");
  await user.click(screen.getByText("default"));
  expect(router.state.location.search).toBe("?other=1");
});

test("only what is pushed can be undone with the back button", async () => {
  const { user, router } = renderAt(<Probe />, { address: "/" });
  await user.click(screen.getByText("seven"));
  expect(router.state.historyAction).toBe("REPLACE");
  await user.click(screen.getByText("advantage"));
  expect(router.state.historyAction).toBe("PUSH");
  expect(read()).toEqual([7, "advantage", [], true, ""]);
});

test("two values that change in one event are both kept, escaped", async () => {
  const { user, router } = renderAt(<Probe />, { address: "/" });
  await user.click(screen.getByText("both"));
  expect(read()).toEqual([9, "mask", [], true, "a&b=c"]);
  expect(router.state.location.search).toBe("?step=9&text=a%26b%3Dc");
});

test("several values change at once", async () => {
  const { user, router } = renderAt(<Probe />, { address: "/?step=2&mode=advantage" });
  await user.click(screen.getByText("several"));
  expect(router.state.location.search).toBe("?text=x");
});

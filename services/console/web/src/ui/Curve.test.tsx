import { screen, within } from "@testing-library/react";
import { expect, test, vi } from "vitest";
import { renderAt } from "../testing/render";
import { Curve, type Series } from "./Curve";

// jsdom gives nothing a size, so nothing is drawn here: tests in a browser look at the canvas.
const X = [1, 2, 3, 10];
const SERIES: Series[] = [
  { name: "reward", label: "Reward", values: [0.1, null, 0.3, 0.2] },
  { name: "em", label: "EM", values: [null, null, null, null] },
];

test("the keyboard moves along the steps, and Enter opens one", async () => {
  const onPoint = vi.fn();
  const { user } = renderAt(
    <Curve title="Reward" x={X} series={SERIES} onPoint={onPoint} marks={[{ x: 2, label: "checkpoint" }]} />,
  );
  const slider = screen.getByRole("slider");
  expect(slider).toHaveAttribute("aria-valuetext", "step 10: Reward 0.2, EM –");
  slider.focus();
  await user.keyboard("{Home}{ArrowRight}");
  expect(slider).toHaveAttribute("aria-valuetext", "step 2: Reward –, EM –");
  expect(screen.getByText("step 2: checkpoint")).toBeInTheDocument();
  await user.keyboard("{ArrowRight}{Enter}");
  expect(onPoint).toHaveBeenCalledExactlyOnceWith(3, 0);
  await user.keyboard("{End}{ArrowRight}");
  expect(slider).toHaveAttribute("aria-valuenow", "10");
});

test("the figure is told in words, with its gaps", () => {
  renderAt(<Curve title="Reward" x={X} series={SERIES} />);
  expect(
    screen.getByText(/Reward: from 0.1 at step 1 to 0.2 at step 10, lowest 0.1 at 1, highest 0.3 at 3. 1 of 4/),
  ).toHaveTextContent("EM: no values.");
});

test("the values are there as a table, as measured and with dashes for gaps", async () => {
  const { user } = renderAt(<Curve title="Reward" x={X} series={SERIES} smoothing={0.9} />);
  expect(screen.queryByRole("table")).toBeNull();
  await user.click(screen.getByText("Values as a table"));
  const rows = within(screen.getByRole("table")).getAllByRole("row").slice(1);
  expect(
    rows.map((row) =>
      within(row)
        .getAllByRole("cell")
        .map((cell) => cell.textContent),
    ),
  ).toEqual([
    ["1", "0.1", "–"],
    ["2", "–", "–"],
    ["3", "0.3", "–"],
    ["10", "0.2", "–"],
  ]);
});

test("a curve is hidden and shown by its name in the legend", async () => {
  const { user } = renderAt(<Curve title="Reward" x={X} series={SERIES} />);
  const key = screen.getByRole("button", { name: /Reward/ });
  await user.click(key);
  expect(key).toHaveAttribute("aria-pressed", "false");
  expect(screen.getByRole("slider")).toHaveAttribute("aria-valuetext", "step 10: EM –");
  await user.click(key);
  expect(key).toHaveAttribute("aria-pressed", "true");
});

test("without steps there is a sentence, and no slider", () => {
  renderAt(<Curve title="Reward" x={[]} series={[{ name: "reward", label: "Reward", values: [] }]} />);
  expect(screen.getByText("No step yet.")).toBeInTheDocument();
  expect(screen.queryByRole("slider")).toBeNull();
});

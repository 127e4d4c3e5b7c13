import { screen, within } from "@testing-library/react";
import { useState } from "react";
import { expect, test, vi } from "vitest";
import { renderAt } from "../testing/render";
import { DataTable, type Column, type Sort } from "./DataTable";

interface Run {
  id: string;
  em: number | null;
}

const RUNS: Run[] = [
  { id: "run-10", em: 0.2 },
  { id: "run-9", em: null },
  { id: "run-1", em: 0.5 },
];
const COLUMNS: Column<Run>[] = [
  { id: "id", header: "Run", cell: ({ id }) => <a href={`#${id}`}>{id}</a>, sortValue: ({ id }) => id },
  { id: "em", header: "EM", cell: ({ em }) => em ?? "–", sortValue: ({ em }) => em, numeric: true },
  { id: "note", header: "Note", cell: () => "" },
];

const ids = () => screen.getAllByRole("link").map((link) => link.textContent);
const header = (name: string) => screen.getByRole("columnheader", { name });

function Table({ rows = RUNS }: { rows?: Run[] }) {
  return <DataTable label="Runs" rows={rows} columns={COLUMNS} rowKey={({ id }) => id} empty={<p>nothing</p>} />;
}

test("a number is sorted from high to low first, and what has no value comes last in both orders", async () => {
  const { user } = renderAt(<Table />);
  expect(ids()).toEqual(["run-10", "run-9", "run-1"]);
  await user.click(within(header("EM")).getByRole("button"));
  expect(ids()).toEqual(["run-1", "run-10", "run-9"]);
  expect(header("EM")).toHaveAttribute("aria-sort", "descending");
  await user.click(within(header("EM")).getByRole("button"));
  expect(ids()).toEqual(["run-10", "run-1", "run-9"]);
  expect(header("EM")).toHaveAttribute("aria-sort", "ascending");
  await user.click(within(header("EM")).getByRole("button"));
  expect(ids()).toEqual(["run-10", "run-9", "run-1"]);
  expect(header("EM")).not.toHaveAttribute("aria-sort");
});

test("names with numbers are sorted as people count, and a column without values has no button", async () => {
  const { user } = renderAt(<Table />);
  await user.click(within(header("Run")).getByRole("button"));
  expect(ids()).toEqual(["run-1", "run-9", "run-10"]);
  expect(within(header("Note")).queryByRole("button")).toBeNull();
});

test("j and k go through the rows and stop at the ends", async () => {
  const { user } = renderAt(<Table />);
  await user.keyboard("j");
  expect(screen.getByText("run-10")).toHaveFocus();
  await user.keyboard("jjjj");
  expect(screen.getByText("run-1")).toHaveFocus();
  await user.keyboard("k");
  expect(screen.getByText("run-9")).toHaveFocus();
  await user.keyboard("kkk");
  expect(screen.getByText("run-10")).toHaveFocus();
});

test("rows that the server sorts keep their order, and a click asks for another", async () => {
  const onSort = vi.fn();
  function Served() {
    const [sort, setSort] = useState<Sort | undefined>({ id: "em", descending: true });
    onSort.mockImplementation(setSort);
    return <DataTable label="Runs" rows={RUNS} columns={COLUMNS} rowKey={({ id }) => id} sort={sort} onSort={onSort} />;
  }
  const { user } = renderAt(<Served />);
  expect(ids()).toEqual(["run-10", "run-9", "run-1"]);
  await user.click(within(header("EM")).getByRole("button"));
  expect(onSort).toHaveBeenLastCalledWith({ id: "em", descending: false });
  expect(ids()).toEqual(["run-10", "run-9", "run-1"]);
});

test("more rows are asked for at the end of those that are there", () => {
  const onEnd = vi.fn();
  const table = (total: number) => (
    <DataTable label="Runs" rows={RUNS} columns={COLUMNS} rowKey={({ id }) => id} total={total} onEnd={onEnd} />
  );
  renderAt(table(3));
  expect(onEnd).not.toHaveBeenCalled();
  renderAt(table(4));
  expect(onEnd).toHaveBeenCalledOnce();
});

test("without rows there is what says so", () => {
  renderAt(<Table rows={[]} />);
  expect(screen.getByText("nothing")).toBeInTheDocument();
  expect(screen.queryByRole("table")).toBeNull();
});

test("of many rows only few are drawn, and all are counted", () => {
  const rows = Array.from({ length: 5000 }, (_, number) => ({ id: `run-${number}`, em: number }));
  renderAt(<Table rows={rows} />);
  expect(screen.getByRole("table")).toHaveAttribute("aria-rowcount", "5001");
  expect(screen.queryAllByRole("link").length).toBeLessThan(100);
});

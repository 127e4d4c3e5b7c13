import { Anchor, Badge } from "@mantine/core";
import { useMemo } from "react";
import { Link } from "react-router";
import type { Model } from "../api/client";
import { paths } from "../app/paths";
import { DataTable, type Column } from "../ui/DataTable";
import { formatNumber, formatScore, Score } from "../ui/format";
import { EmptyState } from "../ui/states";

type Validation = Model<"ValidationRow">;

function listColumns(run: string, rows: Validation[]): Column<Validation>[] {
  const sources = [...new Set(rows.flatMap(({ em_by_source }) => Object.keys(em_by_source)))].toSorted();
  const shared = (name: string, header: string, format: (value: number | null) => string): Column<Validation> => ({
    id: name,
    header,
    cell: ({ metrics }) => format(metrics[name] ?? null),
    sortValue: ({ metrics }) => metrics[name],
    numeric: true,
  });
  return [
    {
      id: "label",
      header: "validation",
      cell: ({ label, is_watch }) => (
        <>
          <Anchor component={Link} to={paths.trajectories(run, { place: label })} size="sm">
            {label}
          </Anchor>{" "}
          {is_watch && <Badge variant="default">watched questions</Badge>}
        </>
      ),
      sortValue: ({ label }) => label,
    },
    { id: "step", header: "step", cell: ({ step }) => step, sortValue: ({ step }) => step, numeric: true },
    {
      id: "em",
      header: "EM, greedy",
      cell: ({ em }) => <Score value={em?.mean} low={em?.low} high={em?.high} />,
      sortValue: ({ em }) => em?.mean,
      numeric: true,
    },
    ...(sources.length > 1
      ? sources.map((source): Column<Validation> => ({
          id: `em ${source}`,
          header: source,
          cell: ({ em_by_source: { [source]: em } }) => <Score value={em?.mean} low={em?.low} high={em?.high} />,
          sortValue: ({ em_by_source }) => em_by_source[source]?.mean,
          numeric: true,
        }))
      : []),
    { id: "count", header: "questions", cell: ({ count }) => count, sortValue: ({ count }) => count, numeric: true },
    {
      id: "failed",
      header: "failed",
      hint: "questions without an answer that could be judged",
      cell: ({ failed }) => failed,
      sortValue: ({ failed }) => failed,
      numeric: true,
    },
    shared("search_rate", "searches", (value) => formatScore(value)),
    shared("turns_mean", "turns", (value) => formatNumber(value, 3)),
    shared("response_tokens_mean", "tokens", (value) => formatNumber(value, 3)),
  ];
}

/** The validations of a run: greedy answers to held-out questions. */
export function Validations({ run, rows }: { run: string; rows: Validation[] }) {
  const columns = useMemo(() => listColumns(run, rows), [run, rows]);
  return (
    <DataTable
      label="Validations"
      rows={rows}
      columns={columns}
      rowKey={({ label }) => label}
      empty={
        <EmptyState title="No validation has ended yet">
          trainer.test_freq says after how many steps one is made; the first and the last are made in any case.
        </EmptyState>
      }
    />
  );
}

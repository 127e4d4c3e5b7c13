import { Anchor } from "@mantine/core";
import { useMemo } from "react";
import { Link } from "react-router";
import type { Model } from "../api/client";
import { paths } from "../app/paths";
import { DataTable, type Column } from "../ui/DataTable";
import { formatTime } from "../ui/format";
import { EmptyState } from "../ui/states";

type Event = Model<"Mark"> & { number: number };

/** What happened to the run, the last first. */
export function EventsTab({ run, marks }: { run: string; marks: Model<"Mark">[] }) {
  const rows = useMemo(() => marks.map((mark, number) => ({ ...mark, number })).toReversed(), [marks]);
  const columns = useMemo<Column<Event>[]>(
    () => [
      {
        id: "step",
        header: "step",
        cell: ({ step }) =>
          step > 0 ? (
            <Anchor component={Link} to={paths.step(run, step)} size="sm">
              {step}
            </Anchor>
          ) : (
            step
          ),
        sortValue: ({ step }) => step,
        numeric: true,
        width: 80,
      },
      { id: "time", header: "time", cell: ({ time }) => formatTime(time), sortValue: ({ time }) => time, width: 170 },
      { id: "kind", header: "what", cell: ({ kind }) => kind, sortValue: ({ kind }) => kind, width: 140 },
      { id: "text", header: "", cell: ({ text }) => <span className="event-text">{text}</span> },
    ],
    [run],
  );
  return (
    <DataTable
      label="Events"
      rows={rows}
      columns={columns}
      rowKey={({ number }) => String(number)}
      empty={<EmptyState title="Nothing has happened yet" />}
    />
  );
}

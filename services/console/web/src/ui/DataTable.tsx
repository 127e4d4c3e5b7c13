// A table that sorts, and draws only the rows in sight. j and k go through the rows, Enter opens the row's link.
import {
  createSortedRowModel,
  rowSortingFeature,
  tableFeatures,
  useTable,
  type ColumnDef,
  type SortingState,
} from "@tanstack/react-table";
import { VisuallyHidden } from "@mantine/core";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState, type ReactNode } from "react";
import styles from "./DataTable.module.css";
import { useHotkeys } from "./hotkeys";
import { EmptyState } from "./states";

export interface Column<Row> {
  id: string;
  header: string;
  /** Leaves the header to those who do not see the table. */
  hidesHeader?: boolean;
  /** Explains the column, as a hint on its header. */
  hint?: string;
  cell: (row: Row) => ReactNode;
  /** Makes the column sortable; rows without a value come last in both orders. */
  sortValue?: (row: Row) => number | string | boolean | null | undefined;
  /** Aligned to the right, with digits of one width, and sorted from high to low first. */
  numeric?: boolean;
  /** Width in pixels; columns without one share the rest. */
  width?: number;
}

export interface Sort {
  id: string;
  descending: boolean;
}

interface Props<Row> {
  /** Names the table for those who do not see it. */
  label: string;
  rows: Row[];
  columns: Column<Row>[];
  rowKey: (row: Row) => string;
  /** With `onSort` the rows come sorted, by the server; without it the table sorts, beginning with `sort`. */
  sort?: Sort | undefined;
  onSort?: ((sort: Sort | undefined) => void) | undefined;
  /** All rows, where `rows` are only the first of them. */
  total?: number | undefined;
  /** Called when the last rows come into sight. */
  onEnd?: (() => void) | undefined;
  empty?: ReactNode;
  rowHeight?: number;
  maxHeight?: number | string;
  /** Off for a table beside another one: j and k belong to one. */
  hotkeys?: boolean;
  /** Attributes of a row, for tests and styles. */
  rowData?: ((row: Row) => Record<`data-${string}`, string>) | undefined;
}

const features = tableFeatures({ rowSortingFeature, sortedRowModel: createSortedRowModel() });
type Features = typeof features;

/** As many rows are drawn at once, which finds them with the browser's own search. */
const FEW = 60;

function compare(one: unknown, other: unknown): number {
  if (typeof one === "number" && typeof other === "number") return one - other;
  if (typeof one === "boolean" && typeof other === "boolean") return Number(one) - Number(other);
  return String(one).localeCompare(String(other), "en", { numeric: true });
}

export function DataTable<Row>({
  label,
  rows,
  columns,
  rowKey,
  sort,
  onSort,
  total,
  onEnd,
  empty = <EmptyState title="Nothing to show" />,
  rowHeight = 38,
  maxHeight = "70vh",
  hotkeys = true,
  rowData,
}: Props<Row>) {
  const [own, setOwn] = useState<Sort | undefined>(sort);
  const current = onSort ? sort : own;
  const setCurrent = onSort ?? setOwn;
  const definitions = useMemo<ColumnDef<Features, { row: Row }>[]>(
    () =>
      columns.map(({ id, sortValue }) => ({
        id,
        accessorFn: ({ row }: { row: Row }) => sortValue?.(row) ?? undefined,
        sortFn: (one, other, column) => compare(one.getValue(column), other.getValue(column)),
        sortUndefined: "last" as const,
      })),
    [columns],
  );
  const data = useMemo(() => rows.map((row) => ({ row })), [rows]);
  const sorting = useMemo<SortingState>(
    () => (current === undefined ? [] : [{ id: current.id, desc: current.descending }]),
    [current],
  );
  const table = useTable({
    features,
    columns: definitions,
    data,
    state: { sorting },
    manualSorting: onSort !== undefined,
  });
  const ordered = table.getRowModel().rows.map(({ original }) => original.row);

  const box = useRef<HTMLDivElement>(null);
  // eslint-disable-next-line react-hooks/incompatible-library -- the rows of the virtualizer are read in this component only
  const virtual = useVirtualizer({
    count: ordered.length,
    getScrollElement: () => box.current,
    estimateSize: () => rowHeight,
    overscan: 12,
    enabled: ordered.length > FEW,
  });
  const items =
    ordered.length > FEW
      ? virtual.getVirtualItems().map(({ index, start, end }) => ({ index, start, end }))
      : ordered.map((_, index) => ({ index, start: index * rowHeight, end: (index + 1) * rowHeight }));
  const before = ordered.length > FEW ? (items[0]?.start ?? 0) : 0;
  const after = ordered.length > FEW ? virtual.getTotalSize() - (items.at(-1)?.end ?? 0) : 0;

  const lastShown = items.at(-1)?.index ?? -1;
  useEffect(() => {
    if (lastShown >= ordered.length - 10 && ordered.length > 0 && ordered.length < (total ?? ordered.length)) onEnd?.();
  }, [lastShown, ordered.length, total, onEnd]);

  const active = useRef(-1);
  const goTo = (index: number) => {
    const next = Math.max(0, Math.min(ordered.length - 1, index));
    active.current = next;
    if (ordered.length > FEW) virtual.scrollToIndex(next);
    // The row may be drawn only after the scroll.
    const focus = (tries: number) => {
      const row = box.current?.querySelector<HTMLElement>(`tr[data-index="${next}"]`);
      if (row)
        (row.querySelector<HTMLElement>("a") ?? row.querySelector<HTMLElement>("button, input") ?? row).focus({
          preventScroll: tries === 0,
        });
      else if (tries < 10)
        requestAnimationFrame(() => {
          focus(tries + 1);
        });
    };
    focus(0);
  };
  useHotkeys(
    [
      {
        keys: "j",
        label: "Next row",
        run: () => {
          goTo(active.current + 1);
        },
      },
      {
        keys: "k",
        label: "Previous row",
        run: () => {
          goTo(active.current - 1);
        },
      },
    ],
    hotkeys && ordered.length > 0,
  );

  const sortBy = ({ id, numeric = false }: Column<Row>) => {
    if (current?.id !== id) setCurrent({ id, descending: numeric });
    else if (current.descending === numeric) setCurrent({ id, descending: !numeric });
    else setCurrent(undefined);
  };

  if (rows.length === 0) return <>{empty}</>;
  return (
    // A box that scrolls must be reachable with the keyboard.
    <div
      ref={box}
      className={`card ${styles.box ?? ""}`}
      style={{ maxHeight }}
      tabIndex={0}
      role="region"
      aria-label={label}
    >
      <table className={styles.table} aria-label={label} aria-rowcount={(total ?? ordered.length) + 1}>
        <colgroup>
          {columns.map(({ id, width }) => (
            <col key={id} style={width === undefined ? undefined : { width }} />
          ))}
        </colgroup>
        <thead>
          <tr aria-rowindex={1}>
            {columns.map((column) => (
              <th
                key={column.id}
                scope="col"
                title={column.hint}
                data-numeric={column.numeric === true || undefined}
                aria-sort={current?.id === column.id ? (current.descending ? "descending" : "ascending") : undefined}
              >
                {column.sortValue === undefined ? (
                  column.hidesHeader === true ? (
                    <VisuallyHidden>{column.header}</VisuallyHidden>
                  ) : (
                    column.header
                  )
                ) : (
                  <button
                    type="button"
                    onClick={() => {
                      sortBy(column);
                    }}
                  >
                    {column.header}
                  </button>
                )}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {before > 0 && <tr aria-hidden="true" style={{ height: before }} />}
          {items.map(({ index }) => {
            const row = ordered[index];
            if (row === undefined) return null;
            return (
              <tr
                key={rowKey(row)}
                ref={virtual.measureElement}
                data-index={index}
                aria-rowindex={index + 2}
                onFocus={() => {
                  active.current = index;
                }}
                {...rowData?.(row)}
              >
                {columns.map(({ id, cell, numeric }) => (
                  <td key={id} data-numeric={numeric === true || undefined} data-column={id}>
                    {cell(row)}
                  </td>
                ))}
              </tr>
            );
          })}
          {after > 0 && <tr aria-hidden="true" style={{ height: after }} />}
        </tbody>
      </table>
    </div>
  );
}

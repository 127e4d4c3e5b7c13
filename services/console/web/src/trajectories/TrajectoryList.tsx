import { useMediaQuery } from "@mantine/hooks";
import { keepPreviousData, useQueries } from "@tanstack/react-query";
import { useWindowVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useRef, useState } from "react";
import { Link } from "react-router";
import { api, type Model } from "../api/client";
import { Marked } from "../trajectory/Marked";
import { formatSigned } from "../trajectory/credit";
import type { Sample } from "../trajectory/layout";
import { AT, linkTrajectory } from "../trajectory/neighbours";
import { useBox } from "../trajectory/useBox";
import { formatNumber, UNKNOWN } from "../ui/format";
import { useHotkeys } from "../ui/hotkeys";
import { ErrorState, Loading } from "../ui/states";
import { toggleSort, type ListQuery, type Sort } from "./filter";
import { findWords, trimSnippet } from "./words";
import "./list.css";

export const PAGE = 100;
const LOADING_MS = 1000;

interface Column {
  id: string;
  label: string;
  hint: string;
  sort: Sort;
  read: (row: Sample) => string;
}

const COLUMNS: readonly Column[] = [
  {
    id: "reward",
    label: "Reward",
    hint: "reward of the trajectory",
    sort: "reward",
    read: (row) => formatNumber(row.reward, 3),
  },
  {
    id: "advantage",
    label: "Adv.",
    hint: "mean advantage over the tokens that were trained on",
    sort: "advantage",
    read: (row) => formatSigned(row.advantage),
  },
  {
    id: "search_advantage",
    label: "Search adv.",
    hint: "mean advantage over the turns that search: how much searching was reinforced",
    sort: "search_advantage",
    read: (row) => formatSigned(row.search_advantage),
  },
  {
    id: "mismatch",
    label: "Mismatch",
    hint: "largest difference between the log-probabilities of trainer and engine",
    sort: "mismatch",
    read: (row) => formatNumber(row.mismatch, 2),
  },
  { id: "searches", label: "Searches", hint: "searches", sort: "searches", read: (row) => formatNumber(row.searches) },
  { id: "turns", label: "Turns", hint: "turns", sort: "turns", read: (row) => formatNumber(row.turns) },
  {
    id: "tokens",
    label: "Tokens",
    hint: "tokens of the response",
    sort: "tokens",
    read: (row) => formatNumber(row.tokens),
  },
];

interface Props {
  run: string;
  query: ListQuery;
  /** The address, which rows keep: it says which list they came from. */
  search: URLSearchParams;
  onQuery: (query: ListQuery) => void;
  /** What to say where nothing passes the filter. */
  empty: React.ReactNode;
  children: (found: Omit<Model<"TrajectoryPage">, "rows">) => React.ReactNode;
}

/** All trajectories that pass a filter; only those in sight are fetched and drawn. */
export function TrajectoryList({ run, query, search, onQuery, empty, children }: Props) {
  const request = (page: number) => ({
    params: { path: { run }, query: { ...query, offset: page * PAGE, limit: PAGE } },
  });
  const first = api.useQuery("get", "/api/runs/{run}/trajectories", request(0), {
    placeholderData: keepPreviousData,
    // The server reads a run's files when somebody looks at it first; what is read is shown already.
    refetchInterval: ({ state }) => ((state.data?.loaded ?? 1) < 1 ? LOADING_MS : false),
  });
  const total = first.data?.total ?? 0;

  const [box, setBox] = useState<HTMLDivElement | null>(null);
  const isNarrow = useMediaQuery("(max-width: 48em)");
  const rowHeight = (isNarrow ? 104 : 50) + (query.text ? 20 : 0);
  const { top } = useBox(box);
  const virtualizer = useWindowVirtualizer({
    count: total,
    estimateSize: () => rowHeight,
    overscan: 12,
    scrollMargin: top,
    scrollPaddingStart: 110,
    scrollPaddingEnd: 20,
  });
  const measure = useRef(virtualizer);
  useEffect(() => {
    measure.current.measure();
  }, [rowHeight]);

  const items = virtualizer.getVirtualItems();
  const pages = [...new Set(items.map(({ index }) => Math.floor(index / PAGE)))].filter((page) => page > 0);
  const others = useQueries({
    queries: pages.map((page) => api.queryOptions("get", "/api/runs/{run}/trajectories", request(page))),
  });
  const loaded = new Map(pages.map((page, place) => [page, others[place]?.data?.rows]));
  const at = (index: number) =>
    index < PAGE ? first.data?.rows[index] : loaded.get(Math.floor(index / PAGE))?.[index % PAGE];
  const failed = others.find(({ error }) => error !== null);

  const active = useRef(-1);
  const goTo = (index: number) => {
    const next = Math.max(0, Math.min(total - 1, index));
    active.current = next;
    virtualizer.scrollToIndex(next);
    focusRow(box, next);
  };
  useHotkeys(
    [
      {
        keys: "j",
        label: "Next trajectory",
        run: () => {
          goTo(active.current + 1);
        },
      },
      {
        keys: "k",
        label: "Previous trajectory",
        run: () => {
          goTo(active.current - 1);
        },
      },
    ],
    total > 0,
  );

  // Back from a trajectory: to where it is in the list.
  const returned = useRef(Number(search.get(AT) ?? -1));
  useEffect(() => {
    const index = returned.current;
    if (box === null || total === 0 || !(index >= 0)) return;
    returned.current = -1;
    active.current = Math.min(index, total - 1);
    measure.current.scrollToIndex(active.current, { align: "center" });
    focusRow(box, active.current);
  }, [box, total]);

  if (first.data === undefined) {
    return first.error ? (
      <ErrorState error={first.error} onRetry={() => void first.refetch()} />
    ) : (
      <Loading lines={12} label="Loading trajectories" />
    );
  }
  return (
    <>
      {children(first.data)}
      {first.error !== null && <ErrorState error={first.error} onRetry={() => void first.refetch()} />}
      {failed !== undefined && <ErrorState error={failed.error} onRetry={() => void failed.refetch()} />}
      {total === 0 ? (
        first.data.loaded < 1 ? (
          <Loading lines={12} label="Loading trajectories" />
        ) : (
          empty
        )
      ) : (
        <div
          className="trajectory-list"
          role="table"
          aria-label="Trajectories"
          aria-rowcount={total + 1}
          data-testid="trajectory-list"
          data-stale={first.isPlaceholderData}
        >
          <div role="rowgroup">
            <div className="head" role="row" aria-rowindex={1}>
              <Header
                query={query}
                sort="place"
                label="Question and answer"
                hint="newest step first"
                onQuery={onQuery}
              />
              <Header query={query} sort="em" label="Right" hint="exact match" onQuery={onQuery} isNumber />
              {COLUMNS.map((column) => (
                <Header key={column.id} {...column} query={query} onQuery={onQuery} isNumber />
              ))}
            </div>
          </div>
          <div ref={setBox} className="body" role="rowgroup" style={{ height: virtualizer.getTotalSize() }}>
            {items.map(({ index, start }) => {
              const row = at(index);
              return (
                <div
                  key={index}
                  className="row"
                  role="row"
                  aria-rowindex={index + 2}
                  data-index={index}
                  data-testid="trajectory-row"
                  style={{ top: start - top, height: rowHeight }}
                >
                  {row === undefined ? (
                    <div role="cell" className="waiting" />
                  ) : (
                    <Cells run={run} row={row} index={index} search={search} query={query} />
                  )}
                </div>
              );
            })}
          </div>
        </div>
      )}
    </>
  );
}

interface CellsProps {
  run: string;
  row: Sample;
  index: number;
  search: URLSearchParams;
  query: ListQuery;
}

function Cells({ run, row, index, search, query }: CellsProps) {
  const isRight = row.em === null ? null : row.em > 0;
  return (
    <>
      <div role="cell" className="cell" data-column="question">
        <div className="line">
          <Link
            className="open"
            to={linkTrajectory(run, row, withColour(search, query), index)}
            onClick={() => {
              rememberRow(index);
            }}
          >
            {row.question === "" ? row.uid : row.question}
          </Link>
        </div>
        <div className="line quiet">
          {row.answer === null ? (
            row.status === "OK" ? (
              "no answer"
            ) : (
              <span className="wrong">
                {row.status}
                {row.reason === null ? "" : `: ${row.reason}`}
              </span>
            )
          ) : (
            <>
              → {row.answer}
              {isRight === false && row.targets.length > 0 && ` (accepted: ${row.targets.join(" | ")})`}
            </>
          )}
          {` · ${row.place}`}
          {row.truncated && " · truncated"}
        </div>
        {row.snippet !== null && <Snippet text={row.snippet} search={query.text ?? ""} />}
      </div>
      <div role="cell" className={`cell number ${isRight === null ? "" : isRight ? "right" : "wrong"}`}>
        {isRight === null ? UNKNOWN : isRight ? "right" : "wrong"}
      </div>
      {COLUMNS.map(({ id, label, sort, read }) => (
        <div
          key={id}
          role="cell"
          className="cell number"
          data-column={id}
          data-label={label}
          data-sorted={sort === query.sort || undefined}
        >
          {read(row)}
        </div>
      ))}
    </>
  );
}

function Snippet({ text, search }: { text: string; search: string }) {
  const trimmed = trimSnippet(text, search);
  return (
    <div className="line quiet">
      <Marked text={trimmed} gold={[]} found={findWords(trimmed, search)} />
    </div>
  );
}

/** Which colours answer the question that an order asks. */
const COLOURS: Partial<Record<Sort, string>> = {
  advantage: "advantage",
  search_advantage: "advantage",
  mismatch: "mismatch",
};

function withColour(search: URLSearchParams, { sort }: ListQuery): URLSearchParams {
  const colour = sort === undefined ? undefined : COLOURS[sort];
  if (colour === undefined || search.has("colour")) return search;
  const found = new URLSearchParams(search);
  found.set("colour", colour);
  return found;
}

/** Writes the opened row into the list's own entry of the history, so that the back button returns to it. */
function rememberRow(index: number): void {
  const address = new URL(window.location.href);
  address.searchParams.set(AT, String(index));
  window.history.replaceState(window.history.state, "", address);
}

interface HeaderProps {
  query: ListQuery;
  sort: Sort;
  label: string;
  hint: string;
  isNumber?: boolean;
  onQuery: (query: ListQuery) => void;
}

function Header({ query, sort, label, hint, isNumber = false, onQuery }: HeaderProps) {
  const isSorted = (query.sort ?? "place") === sort;
  const order = query.order ?? "descending";
  return (
    <div
      role="columnheader"
      className={isNumber ? "cell number" : "cell"}
      data-column={sort}
      title={hint}
      {...(isSorted && { "aria-sort": order })}
    >
      <button
        type="button"
        onClick={() => {
          onQuery(toggleSort(query, sort));
        }}
      >
        {label}
        {isSorted ? (order === "ascending" ? " ↑" : " ↓") : ""}
      </button>
    </div>
  );
}

/** Focuses a row's link, which is drawn only after the list has scrolled to it. */
function focusRow(box: HTMLElement | null, index: number, tries = 0): void {
  const link = box?.querySelector<HTMLElement>(`[data-index="${index}"] .open`);
  if (link) link.focus({ preventScroll: true });
  else if (tries < 30)
    requestAnimationFrame(() => {
      focusRow(box, index, tries + 1);
    });
}

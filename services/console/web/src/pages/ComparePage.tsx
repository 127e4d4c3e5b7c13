// Two runs: settings that differ, curves in the same figures, questions won and lost.
import { keepPreviousData, useInfiniteQuery } from "@tanstack/react-query";
import { useCallback, useMemo } from "react";
import { client } from "../api/client";
import { paths } from "../app/paths";
import { CurvesOfComparison } from "../compare/CurvesOfComparison";
import { asOutcome, QuestionsOfComparison } from "../compare/QuestionsOfComparison";
import { Facts, RunChooser, Settings } from "../compare/RunsOfComparison";
import { Page } from "../ui/Page";
import { asText, useSearchParam, useSetSearch } from "../ui/searchParams";
import { EmptyState, QueryState } from "../ui/states";

const PAGE = 100;

function useComparison(a: string, b: string) {
  const [label_a] = useSearchParam("label_a", asText, "");
  const [label_b] = useSearchParam("label_b", asText, "");
  const [outcome] = useSearchParam("outcome", asOutcome, "");
  const [source] = useSearchParam("source", asText, "");
  const [text] = useSearchParam("text", asText, "");
  const filter = { a, b, label_a, label_b, outcome: outcome === "" ? null : outcome, source, text };
  return useInfiniteQuery({
    queryKey: ["get", "/api/compare", { params: { query: filter } }],
    enabled: a !== "" && b !== "",
    initialPageParam: 0,
    queryFn: async ({ pageParam: offset, signal }) => {
      const query = { ...filter, offset, limit: PAGE };
      const { data } = await client.GET("/api/compare", { params: { query }, signal });
      if (data === undefined) throw new Error("the comparison has no answer");
      return data;
    },
    getNextPageParam: ({ total }, pages) => (pages.length * PAGE < total ? pages.length * PAGE : null),
    placeholderData: keepPreviousData,
  });
}

export default function ComparePage() {
  const [a] = useSearchParam("a", asText, "");
  const [b] = useSearchParam("b", asText, "");
  const set = useSetSearch();
  const query = useComparison(a, b);
  const { fetchNextPage, hasNextPage, isFetching } = query;
  const onEnd = useCallback(() => {
    if (hasNextPage && !isFetching) void fetchNextPage();
  }, [fetchNextPage, hasNextPage, isFetching]);
  const pairs = useMemo(() => query.data?.pages.flatMap((page) => page.pairs) ?? [], [query.data]);
  return (
    <Page title="Two runs" crumbs={[{ label: "Runs", to: paths.runs() }]}>
      <RunChooser
        a={a}
        b={b}
        onChange={(nextA, nextB) => {
          // Validations belong to the runs that were there before.
          set({ a: nextA, b: nextB, label_a: null, label_b: null });
        }}
      />
      {a === "" || b === "" ? (
        <EmptyState title="Choose two runs">
          The same run twice compares two of its validations, for example before and after training.
        </EmptyState>
      ) : (
        <QueryState query={{ ...query, data: query.data?.pages[0] }}>
          {(comparison) => (
            <>
              <Facts comparison={comparison} />
              <Settings differences={comparison.settings} />
              <CurvesOfComparison a={a} b={b} metrics={comparison.metrics} />
              <QuestionsOfComparison comparison={comparison} pairs={pairs} total={comparison.total} onEnd={onEnd} />
            </>
          )}
        </QueryState>
      )}
    </Page>
  );
}

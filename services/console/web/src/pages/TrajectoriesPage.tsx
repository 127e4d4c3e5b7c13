import { Button, Text } from "@mantine/core";
import { keepPreviousData } from "@tanstack/react-query";
import { useCallback, useMemo } from "react";
import { useParams, useSearchParams } from "react-router";
import { api } from "../api/client";
import { paths } from "../app/paths";
import { EVERY_STEP, NAMES, readQuery, writeQuery, type ListQuery } from "../trajectories/filter";
import { FilterBar } from "../trajectories/FilterBar";
import { TrajectoryList } from "../trajectories/TrajectoryList";
import { AT } from "../trajectory/neighbours";
import { formatDuration, formatNumber, formatScore } from "../ui/format";
import { Page } from "../ui/Page";
import { EmptyState } from "../ui/states";

export default function TrajectoriesPage() {
  const { run = "" } = useParams();
  const [search, setSearch] = useSearchParams();
  const query = useMemo(() => readQuery(search), [search]);
  const facets = api.useQuery(
    "get",
    "/api/runs/{run}/facets",
    { params: { path: { run }, query: { place: query.place ?? EVERY_STEP } } },
    { placeholderData: keepPreviousData },
  );
  const change = useCallback(
    (next: ListQuery, replace = false) => {
      setSearch(
        (before) => {
          const after = writeQuery(next, before);
          after.delete(AT);
          return after;
        },
        { replace },
      );
      // The header stays in sight far down the list; another order begins at its top.
      window.scrollTo({ top: 0 });
    },
    [setSearch],
  );
  const setText = useCallback(
    (text: string) => {
      const rest = { ...query };
      delete rest.text;
      change(text.trim() === "" ? rest : { ...rest, text }, true);
    },
    [query, change],
  );
  const isFiltered = NAMES.some((name) => name !== "sort" && name !== "order" && search.has(name));
  return (
    <Page title="Trajectories" crumbs={[{ label: run, to: paths.run(run) }]}>
      <FilterBar run={run} query={query} facets={facets.data} onQuery={change} onText={setText} />
      <TrajectoryList
        run={run}
        query={query}
        search={search}
        onQuery={change}
        empty={
          isFiltered ? (
            <EmptyState title="No trajectory passes this filter">
              <Button
                variant="default"
                size="xs"
                mt={6}
                onClick={() => {
                  change({});
                }}
              >
                Clear the filter
              </Button>
            </EmptyState>
          ) : (
            <EmptyState title="No trajectories are saved yet">
              A run keeps those of every so many steps, trainer.rollout_data_freq. Those of validations are chosen
              instead of “all steps”.
            </EmptyState>
          )
        }
      >
        {(found) => (
          <Text size="sm" className="quiet number" role="status" data-testid="found">
            {formatNumber(found.total)} of {formatNumber(found.all)} trajectories in {formatDuration(found.seconds)}
            {found.loaded < 1 && ` · ${formatScore(found.loaded, 0)} of the files are read, more are to come`}
            {query.text &&
              found.indexed < 1 &&
              ` · ${formatScore(found.indexed, 0)} of the texts are indexed, searching gets faster`}
          </Text>
        )}
      </TrajectoryList>
    </Page>
  );
}

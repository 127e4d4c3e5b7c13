import { Anchor, Badge, Chip, Group as Row, Stack, Text } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { useMemo } from "react";
import { Link } from "react-router";
import { paths } from "../app/paths";
import { DataTable, type Column } from "../ui/DataTable";
import { formatNumber } from "../ui/format";
import { SearchInput } from "../ui/SearchInput";
import { asOneOf, asText, useSearchParam } from "../ui/searchParams";
import { EmptyState } from "../ui/states";
import { countStates, filterGroups, findRange, MEANINGS, STATES, type Group } from "./groups";
import { Rewards } from "./Rewards";

/** Columns that a narrow window has room for. */
const NARROW = new Set(["rewards", "question"]);

const asState = asOneOf(["", ...STATES]);

function listColumns(
  run: string,
  place: string,
  range: { low: number; high: number },
  isNarrow: boolean,
): Column<Group>[] {
  const all: Column<Group>[] = [
    {
      id: "rewards",
      header: "rewards",
      hint: `one dot a sample, from ${formatNumber(range.low, 3)} to ${formatNumber(range.high, 3)}`,
      cell: (group) => <Rewards rewards={group.rewards} range={range} />,
      width: 150,
    },
    {
      id: "spread",
      header: "spread",
      hint: "largest minus smallest reward",
      cell: (group) => formatNumber(group.spread, 3),
      sortValue: (group) => group.spread,
      numeric: true,
      width: 90,
    },
    {
      id: "mean",
      header: "mean",
      cell: (group) => formatNumber(group.mean, 3),
      sortValue: (group) => group.mean,
      numeric: true,
      width: 80,
    },
    {
      id: "state",
      header: "state",
      cell: (group) => (
        <Badge variant="default" className={`group-state group-${group.state}`} title={MEANINGS[group.state]}>
          {group.state}
        </Badge>
      ),
      sortValue: (group) => group.state,
      width: 100,
    },
    {
      id: "question",
      header: "question",
      cell: (group) => (
        <div className="group-question">
          {group.samples.length > 0 ? (
            <Anchor component={Link} to={paths.group(run, place, group.uid)} size="sm">
              {group.question === "" ? group.uid : group.question}
            </Anchor>
          ) : (
            <Text size="sm">{group.question === "" ? group.uid : group.question}</Text>
          )}
          {(isNarrow || group.reason !== null) && (
            <Text size="xs" className="quiet">
              {isNarrow && `${group.state}, spread ${formatNumber(group.spread, 3)}`}
              {isNarrow && group.reason !== null && ": "}
              {group.reason}
            </Text>
          )}
        </div>
      ),
      sortValue: (group) => group.question,
    },
    {
      id: "source",
      header: "source",
      cell: (group) => group.data_source,
      sortValue: (group) => group.data_source,
      width: 120,
    },
  ];
  return isNarrow ? all.filter(({ id }) => NARROW.has(id)) : all;
}

/** The groups of a step, those first whose samples differ most. */
export function Groups({ run, place, groups }: { run: string; place: string; groups: Group[] }) {
  const [state, setState] = useSearchParam("state", asState, "");
  const [text, setText] = useSearchParam("q", asText, "");
  const range = useMemo(() => findRange(groups), [groups]);
  const isNarrow = useMediaQuery("(max-width: 40em)");
  const columns = useMemo(() => listColumns(run, place, range, isNarrow), [run, place, range, isNarrow]);
  const shown = useMemo(() => filterGroups(groups, state, text), [groups, state, text]);
  const counts = countStates(groups);
  return (
    <Stack gap="xs">
      <Row justify="space-between" gap="xs">
        <Chip.Group
          value={state}
          onChange={(value) => {
            setState(asState.read(value) ?? "");
          }}
        >
          <Row gap={6} role="group" aria-label="States of groups">
            <Chip size="xs" variant="outline" value="">
              all {groups.length}
            </Chip>
            {counts.map(([name, count]) => (
              <Chip
                key={name}
                size="xs"
                variant="outline"
                value={name}
                title={MEANINGS[name]}
                data-testid={`state-${name}`}
              >
                {name} {count}
              </Chip>
            ))}
          </Row>
        </Chip.Group>
        <SearchInput label="Search the questions" value={text} onChange={setText} w={230} />
      </Row>
      <DataTable
        label="Groups of the step"
        rows={shown}
        columns={columns}
        rowKey={(group) => `${group.state} ${group.uid}`}
        sort={{ id: "spread", descending: true }}
        rowHeight={58}
        rowData={(group) => ({ "data-group": group.uid, "data-state": group.state })}
        empty={<EmptyState title="No group passes the filter">Choose another state, or search less.</EmptyState>}
      />
    </Stack>
  );
}

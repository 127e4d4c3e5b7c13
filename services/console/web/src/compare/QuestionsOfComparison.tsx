// Questions that were won and lost between a validation of A and one of B.
import { Anchor, Group, SegmentedControl, Select, Stack, Table, Text, Title } from "@mantine/core";
import { useCallback, useMemo } from "react";
import { Link } from "react-router";
import type { Model } from "../api/client";
import { paths } from "../app/paths";
import { DataTable, type Column } from "../ui/DataTable";
import { formatNumber, formatScore, UNKNOWN } from "../ui/format";
import { SearchInput } from "../ui/SearchInput";
import { asOneOf, asText, useSearchParam } from "../ui/searchParams";
import { EmptyState } from "../ui/states";
import styles from "./compare.module.css";
import { formatP, formatPoints } from "./curves";

type Comparison = Model<"RunComparison">;
type Pair = Model<"QuestionPair">;
type Side = Model<"AnswerSide">;

export const OUTCOMES = ["won", "lost", "both", "neither"] as const;
export const asOutcome = asOneOf(["", ...OUTCOMES]);

const HINTS: Record<Model<"Outcome">, string> = {
  won: "A was wrong, B is right",
  lost: "A was right, B is wrong",
  both: "both are right",
  neither: "neither is right",
};

function Answer({ side }: { side: Side }) {
  return (
    <Anchor
      component={Link}
      to={paths.trajectory(side.run, side.place, side.row)}
      size="sm"
      style={{ overflowWrap: "anywhere" }}
      title={`reward ${formatNumber(side.reward)}: open the trajectory`}
    >
      {side.answer === null || side.answer.trim() === "" ? "no answer" : side.answer}
    </Anchor>
  );
}

export function OutcomeBadge({ outcome }: { outcome: Model<"Outcome"> }) {
  return (
    <span className={styles.outcome} data-outcome={outcome} title={HINTS[outcome]}>
      {outcome}
    </span>
  );
}

const COLUMNS: Column<Pair>[] = [
  { id: "outcome", header: "Outcome", cell: ({ outcome }) => <OutcomeBadge outcome={outcome} />, width: 90 },
  { id: "question", header: "Question", cell: ({ question }) => <div className={styles.question}>{question}</div> },
  { id: "a", header: "Answer of A", cell: ({ a }) => <Answer side={a} /> },
  { id: "b", header: "Answer of B", cell: ({ b }) => <Answer side={b} /> },
  { id: "targets", header: "Accepted", cell: ({ targets }) => targets.slice(0, 3).join(" · ") || UNKNOWN },
  { id: "source", header: "Source", cell: ({ data_source }) => <span className="quiet">{data_source}</span> },
];

function Sources({ sources }: { sources: Comparison["sources"] }) {
  return (
    <div className={`card ${styles.facts ?? ""}`} role="region" aria-label="Exact match by data source" tabIndex={0}>
      <Table verticalSpacing={4} aria-label="Exact match by data source">
        <Table.Thead>
          <Table.Tr>
            <Table.Th scope="col">Source</Table.Th>
            {["Questions", "EM of A", "EM of B", "B − A, points", ...OUTCOMES].map((name) => (
              <Table.Th key={name} scope="col" ta="right">
                {name}
              </Table.Th>
            ))}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody className="number">
          {sources.map(({ data_source, questions, em_a, em_b, difference, outcomes }) => {
            const isClear = difference.low > 0 || difference.high < 0;
            const tone = isClear ? (difference.mean > 0 ? "good" : "bad") : undefined;
            return (
              <Table.Tr key={data_source}>
                <Table.Th scope="row" fw={500}>
                  {data_source}
                </Table.Th>
                <Table.Td ta="right">{formatNumber(questions)}</Table.Td>
                <Table.Td ta="right">{formatScore(em_a)}</Table.Td>
                <Table.Td ta="right">{formatScore(em_b)}</Table.Td>
                <Table.Td ta="right" c={tone && `var(--${tone})`} className="nowrap">
                  {formatPoints(difference.mean)}{" "}
                  <span className="quiet">
                    ({formatPoints(difference.low)} to {formatPoints(difference.high)}, {formatP(difference.p)})
                  </span>
                </Table.Td>
                {OUTCOMES.map((outcome) => (
                  <Table.Td key={outcome} ta="right">
                    {formatNumber(outcomes[outcome] ?? 0)}
                  </Table.Td>
                ))}
              </Table.Tr>
            );
          })}
        </Table.Tbody>
      </Table>
    </div>
  );
}

interface Props {
  comparison: Comparison;
  pairs: Pair[];
  total: number;
  onEnd: () => void;
}

export function QuestionsOfComparison({ comparison, pairs, total, onEnd }: Props) {
  const { labels_a, labels_b, label_a, label_b, sources, only_a, only_b } = comparison;
  const [, setLabelA] = useSearchParam("label_a", asText, "");
  const [, setLabelB] = useSearchParam("label_b", asText, "");
  const [outcome, setOutcome] = useSearchParam("outcome", asOutcome, "");
  const [source, setSource] = useSearchParam("source", asText, "");
  const [text, setText] = useSearchParam("text", asText, "");
  const names = useMemo(
    () => sources.map(({ data_source }) => data_source).filter((name) => name !== "all"),
    [sources],
  );
  const chooseLabel = (side: string, labels: string[], label: string, set: (label: string) => void) => (
    <Select
      label={`Validation of ${side}`}
      size="xs"
      w={180}
      data={labels}
      value={label === "" ? null : label}
      placeholder="none yet"
      allowDeselect={false}
      onChange={(chosen) => {
        if (chosen !== null) set(chosen);
      }}
    />
  );
  const onChoose = useCallback(
    (value: string) => {
      setOutcome(asOutcome.read(value) ?? "");
    },
    [setOutcome],
  );
  return (
    <Stack gap="xs" component="section" aria-labelledby="questions">
      <Title order={2} size="h4" id="questions">
        Questions won and lost
      </Title>
      <Group gap="sm" align="flex-end">
        {chooseLabel("A", labels_a, label_a, setLabelA)}
        {chooseLabel("B", labels_b, label_b, setLabelB)}
      </Group>
      {sources.length === 0 ? (
        <EmptyState title="No validation of A asked the same questions as one of B">
          Both runs need a finished validation: before and after training, and every <code>trainer.test_freq</code>{" "}
          steps.
        </EmptyState>
      ) : (
        <>
          <Text size="sm" className="quiet">
            Greedy answers of ‘{label_a}’ and ‘{label_b}’ to the same questions, with 95 % intervals.
            {only_a + only_b > 0 &&
              ` Left out: ${formatNumber(only_a)} questions that only A answered, ${formatNumber(only_b)} that only B answered.`}
          </Text>
          <Sources sources={sources} />
          <Group gap="sm">
            <SegmentedControl
              size="xs"
              aria-label="Outcome"
              value={outcome}
              onChange={onChoose}
              data={[{ value: "", label: "all" }, ...OUTCOMES]}
            />
            {names.length > 1 && (
              <Select
                aria-label="Source"
                size="xs"
                w={180}
                placeholder="all sources"
                clearable
                data={names}
                value={source === "" ? null : source}
                onChange={(chosen) => {
                  setSource(chosen ?? "");
                }}
              />
            )}
            <SearchInput label="Search questions" value={text} onChange={setText} />
            <Text size="sm" className="quiet number" role="status">
              {formatNumber(total)} {total === 1 ? "question" : "questions"}
            </Text>
          </Group>
          <DataTable
            label="Questions"
            rows={pairs}
            columns={COLUMNS}
            rowKey={({ uid }) => uid}
            rowData={({ outcome: data }) => ({ "data-outcome-row": data })}
            total={total}
            onEnd={onEnd}
            empty={<EmptyState title="No question passes the filter" />}
          />
        </>
      )}
    </Stack>
  );
}

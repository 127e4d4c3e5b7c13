import { Anchor, Badge, Group, Select, Stack, Switch, Text } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { useMemo } from "react";
import { Link, useParams } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { Appearances } from "../questions/Appearances";
import "../questions/questions.css";
import { useQuestions } from "../questions/useQuestions";
import { DataTable, type Column } from "../ui/DataTable";
import { Page } from "../ui/Page";
import { SearchInput } from "../ui/SearchInput";
import { asFlag, asText, useSearchParam } from "../ui/searchParams";
import { EmptyState, QueryState } from "../ui/states";

type Question = Model<"QuestionRow">;

const NARROW = new Set(["question", "points"]);

function listColumns(run: string, uids: string[], isNarrow: boolean): Column<Question>[] {
  const all: Column<Question>[] = [
    {
      id: "question",
      header: "question",
      cell: ({ uid, question, targets, is_watched }) => (
        <div className="question-text">
          <Anchor component={Link} to={paths.question(run, uid)} state={{ uids }} size="sm">
            {question === "" ? uid : question}
          </Anchor>{" "}
          {is_watched && <Badge variant="default">watched</Badge>}
          <Text size="xs" className="quiet">
            {targets.join(", ")}
          </Text>
        </div>
      ),
    },
    {
      id: "points",
      header: "over time",
      hint: "one bar an appearance, as high as its exact match",
      cell: ({ points }) => <Appearances points={points} />,
    },
    {
      id: "answer",
      header: "last answer",
      cell: ({ points }) => <span className="question-text">{points.at(-1)?.answer ?? "–"}</span>,
    },
    {
      id: "changes",
      header: "changes",
      hint: "how often right became wrong, or wrong right",
      cell: ({ changes }) => changes,
      numeric: true,
    },
    { id: "source", header: "source", cell: ({ data_source }) => data_source },
  ];
  return isNarrow ? all.filter(({ id }) => NARROW.has(id)) : all;
}

function Sources({ run, value, onChange }: { run: string; value: string; onChange: (value: string) => void }) {
  const { data } = api.useQuery("get", "/api/runs/{run}", { params: { path: { run } } });
  const sources = [...new Set(data?.validations.flatMap(({ em_by_source }) => Object.keys(em_by_source)))].toSorted();
  if (sources.length < 2 && value === "") return null;
  return (
    <Select
      size="xs"
      w={170}
      aria-label="Source"
      data={[{ value: "", label: "All sources" }, ...sources]}
      value={value}
      allowDeselect={false}
      onChange={(chosen) => {
        onChange(chosen ?? "");
      }}
    />
  );
}

export default function QuestionsPage() {
  const { run = "" } = useParams();
  const [text, setText] = useSearchParam("text", asText, "");
  const [source, setSource] = useSearchParam("source", asText, "");
  const [watched, setWatched] = useSearchParam("watched", asFlag, false);
  const [changed, setChanged] = useSearchParam("changed", asFlag, false);
  const questions = useQuestions(run, { text, source, watched, changed });
  const isNarrow = useMediaQuery("(max-width: 40em)");
  const rows = questions.data?.rows;
  const columns = useMemo(
    () =>
      listColumns(
        run,
        (rows ?? []).map(({ uid }) => uid),
        isNarrow,
      ),
    [run, rows, isNarrow],
  );
  const isFiltered = text !== "" || source !== "" || watched || changed;
  return (
    <Page title="Questions" crumbs={[{ label: run, to: paths.run(run) }]}>
      <Stack gap="xs">
        <Group gap="md">
          <SearchInput label="Search questions and answers" value={text} onChange={setText} w={260} />
          <Sources run={run} value={source} onChange={setSource} />
          <Switch
            size="xs"
            label="Only watched"
            checked={watched}
            onChange={(event) => {
              setWatched(event.currentTarget.checked);
            }}
          />
          <Switch
            size="xs"
            label="Only changed"
            checked={changed}
            onChange={(event) => {
              setChanged(event.currentTarget.checked);
            }}
          />
          {questions.data !== undefined && (
            <Text size="sm" className="quiet number" role="status" data-testid="question-total">
              {questions.data.total.toLocaleString("en")} {questions.data.total === 1 ? "question" : "questions"}
            </Text>
          )}
        </Group>
        <QueryState query={questions}>
          {(data) => (
            <DataTable
              label="Questions"
              rows={data.rows}
              total={data.total}
              onEnd={questions.readOn}
              columns={columns}
              rowKey={({ uid }) => uid}
              rowHeight={54}
              rowData={({ uid }) => ({ "data-question": uid })}
              empty={
                isFiltered ? (
                  <EmptyState title="No question passes the filter">Search less, or show all.</EmptyState>
                ) : (
                  <EmptyState title="No held-out question was asked yet">
                    They come with the first validation. trainer.watch_questions samples some questions of the training
                    data every few steps, too.
                  </EmptyState>
                )
              }
            />
          )}
        </QueryState>
      </Stack>
    </Page>
  );
}

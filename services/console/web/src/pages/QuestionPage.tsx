import { Anchor, Badge, Button, Group, Select, Stack, Text } from "@mantine/core";
import { useMediaQuery } from "@mantine/hooks";
import { useMemo } from "react";
import { Link, useLocation, useNavigate, useParams } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { choosePair, diffTexts, move, nameOf, type Point } from "../questions/diff";
import { DiffView } from "../questions/DiffView";
import "../questions/questions.css";
import { describePoint, Strip } from "../questions/Strip";
import { formatNumber, Score, UNKNOWN } from "../ui/format";
import { useHotkeys } from "../ui/hotkeys";
import { Page } from "../ui/Page";
import { asText, useSearchParam, useSetSearch } from "../ui/searchParams";
import { EmptyState, QueryState } from "../ui/states";

/** The questions of the list that the reader came from, to go on to the next. */
function useNeighbours(run: string, uid: string) {
  const navigate = useNavigate();
  const state = useLocation().state as { uids?: string[] } | null;
  const uids = state?.uids ?? [];
  const at = uids.indexOf(uid);
  const to = (by: number) => () => {
    const next = at === -1 ? undefined : uids[at + by];
    if (next !== undefined) void navigate(paths.question(run, next), { state });
  };
  useHotkeys(
    [
      { keys: "j", label: "Next question of the list", run: to(1) },
      { keys: "k", label: "Previous question of the list", run: to(-1) },
    ],
    at !== -1,
  );
}

function Side({ run, name, point }: { run: string; name: string; point: Point }) {
  return (
    <div className="diff-side" data-testid={`side-${name}`}>
      <Group gap={6}>
        <Badge variant="default">{name}</Badge>
        <Anchor component={Link} to={paths.trajectory(run, point.place, point.row)} size="sm">
          {describePoint(point)}
        </Anchor>
        {point.samples > 1 && (
          <Text size="sm" className="quiet">
            {point.samples} samples
          </Text>
        )}
      </Group>
      <Text size="sm" style={{ overflowWrap: "anywhere" }}>
        answer <b>{point.answer ?? UNKNOWN}</b>{" "}
        <span className="quiet">
          · exact match <Score value={point.em} /> · reward {formatNumber(point.reward, 3)}
        </span>
      </Text>
    </div>
  );
}

function Question({ run, detail }: { run: string; detail: Model<"QuestionDetail"> }) {
  const { question, texts } = detail;
  const points = useMemo(() => texts.map(({ point }) => point), [texts]);
  const [older] = useSearchParam("a", asText, "");
  const [newer] = useSearchParam("b", asText, "");
  const set = useSetSearch();
  const isNarrow = useMediaQuery("(max-width: 48em)");
  const pair = choosePair(points, older, newer);
  const pairA = pair?.a ?? -1;
  const pairB = pair?.b ?? -1;
  const pointA = points[pairA];
  const pointB = points[pairB];
  const diff = useMemo(() => {
    const written = (index: number) => texts[index]?.blocks.filter(({ author }) => author !== "prompt") ?? [];
    return diffTexts(written(pairA), written(pairB));
  }, [texts, pairA, pairB]);

  // Both sides are written, so that choosing one does not choose another for the other.
  const choose = (a: string, b: string) => {
    set({ a, b });
  };
  const nameA = pointA === undefined ? "" : nameOf(pointA);
  const nameB = pointB === undefined ? "" : nameOf(pointB);
  const step = (by: number) => (event: KeyboardEvent) => {
    if (event.shiftKey) choose(move(points, pairA, by), nameB);
    else choose(nameA, move(points, pairB, by));
  };
  useHotkeys([
    { keys: "ArrowLeft", label: "Earlier appearance as B, with Shift as A", run: step(-1) },
    { keys: "ArrowRight", label: "Later appearance as B, with Shift as A", run: step(1) },
  ]);

  return (
    <Stack gap="md">
      <div>
        <Text fw={600} size="lg" style={{ overflowWrap: "anywhere" }}>
          {question.question}
        </Text>
        <Text size="sm" className="quiet" style={{ overflowWrap: "anywhere" }}>
          accepted: {question.targets.join(", ")} · {question.data_source}
          {question.is_watched && " · watched"} · {question.changes} {question.changes === 1 ? "change" : "changes"}{" "}
          between right and wrong
        </Text>
      </div>
      {pointA === undefined || pointB === undefined ? (
        <EmptyState title="The policy was not asked this question yet">
          Its answers come with the validations of the run.
        </EmptyState>
      ) : (
        <>
          <Strip
            points={points}
            a={pairA}
            b={pairB}
            onChoose={(name, isOlder) => {
              if (isOlder) choose(name, nameB);
              else choose(nameA, name);
            }}
          />
          <Group gap="sm" align="flex-end">
            <Select
              size="xs"
              label="A"
              w={230}
              data={points.map((point) => ({ value: nameOf(point), label: describePoint(point) }))}
              value={nameA}
              allowDeselect={false}
              onChange={(value) => {
                choose(value ?? nameA, nameB);
              }}
            />
            <Select
              size="xs"
              label="B"
              w={230}
              data={points.map((point) => ({ value: nameOf(point), label: describePoint(point) }))}
              value={nameB}
              allowDeselect={false}
              onChange={(value) => {
                choose(nameA, value ?? nameB);
              }}
            />
            <Button
              size="xs"
              variant="default"
              component={Link}
              to={paths.ask(run, { question: question.question })}
              data-testid="ask-now"
            >
              Ask the policy of now
            </Button>
          </Group>
          <DiffView
            diff={diff}
            isUnified={isNarrow}
            older={<Side run={run} name="A" point={pointA} />}
            newer={<Side run={run} name="B" point={pointB} />}
          />
        </>
      )}
    </Stack>
  );
}

export default function QuestionPage() {
  const { run = "", uid = "" } = useParams();
  useNeighbours(run, uid);
  const query = api.useQuery("get", "/api/runs/{run}/questions/{uid}", { params: { path: { run, uid } } });
  return (
    <Page
      title="Question over time"
      crumbs={[
        { label: run, to: paths.run(run) },
        { label: "Questions", to: paths.questions(run) },
      ]}
    >
      <QueryState query={query}>{(detail) => <Question key={uid} run={run} detail={detail} />}</QueryState>
    </Page>
  );
}

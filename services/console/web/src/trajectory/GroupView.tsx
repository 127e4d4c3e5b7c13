import { Button, Group, NativeSelect, Text } from "@mantine/core";
import { useMemo } from "react";
import { paths } from "../app/paths";
import { diffTexts } from "../questions/diff";
import { useHotkeys } from "../ui/hotkeys";
import { asFlag, asList, asOneOf, useSearchParam } from "../ui/searchParams";
import { Legend } from "./ColourBar";
import { colourTokens, DEFAULT_MODE, findMode, fitScale, isAvailable, MODE_IDS, MODES, type ModeId } from "./colours";
import { createGoldFinder } from "./gold";
import { GroupSums } from "./GroupSums";
import type { Detail, Sample } from "./layout";
import { withoutPrompt } from "./Replay";
import { SampleColumn } from "./SampleColumn";
import { TextChanges } from "./TextChanges";
import "./trajectory.css";

export interface GroupData {
  targets: string[];
  estimator: string | null;
  baseline: number | null;
  deviation: number | null;
  samples: Detail[];
}

const asMode = asOneOf(MODE_IDS);

/** All samples of a prompt side by side, what made their advantages, and what differs between two of them. */
export function GroupView({ run, group }: { run: string; group: GroupData }) {
  const { samples } = group;
  const [wanted, setMode] = useSearchParam<ModeId>("colour", asMode, "advantage");
  const [showsPassages, setShowsPassages] = useSearchParam("observations", asFlag, true);
  const [chosen, setChosen] = useSearchParam<string[]>("compare", asList, []);
  const isOn = (id: ModeId) => samples.some((one) => isAvailable(findMode(id), one.tokens, one.step_version));
  const mode = isOn(wanted) ? wanted : DEFAULT_MODE;
  const findGold = useMemo(() => createGoldFinder(group.targets), [group.targets]);
  // One scale for all samples, so that equal colours are equal values.
  const { scale, colours } = useMemo(() => {
    const { kind, read } = findMode(mode);
    const values = samples.map(({ tokens, step_version: version }) => (tokens === null ? null : read(tokens, version)));
    const fitted = fitScale(
      kind,
      values.filter((column) => column !== null),
    );
    return { scale: fitted, colours: values.map((column) => colourTokens(fitted, column)) };
  }, [mode, samples]);
  const link = (sample: Sample) => paths.trajectory(run, sample.place, sample.row, { colour: mode });
  const choose = (sample: number, isChosen: boolean) => {
    const name = String(sample);
    setChosen(
      isChosen ? [...chosen.filter((one) => one !== name), name].slice(-2) : chosen.filter((one) => one !== name),
    );
  };
  useHotkeys([
    {
      keys: "o",
      label: "Observations as passages, or as the policy read them",
      run: () => {
        setShowsPassages(!showsPassages);
      },
    },
    {
      keys: "Escape",
      label: "Stop comparing",
      run: () => {
        setChosen([]);
      },
    },
  ]);
  const pair = chosen.flatMap((name) => samples.find(({ summary }) => String(summary.sample) === name) ?? []);
  return (
    <div className="trajectory group">
      <GroupSums
        estimator={group.estimator}
        baseline={group.baseline}
        deviation={group.deviation}
        samples={samples.map(({ summary }) => summary)}
        turns={samples.map(({ turns }) => turns.map(({ advantage }) => advantage))}
        link={link}
      />
      <Group gap="sm" my="sm">
        <NativeSelect
          size="xs"
          aria-label="Colour by"
          value={mode}
          data={MODES.map(({ id, label }) => ({ value: id, label, disabled: !isOn(id) }))}
          onChange={(event) => {
            setMode(asMode.read(event.currentTarget.value) ?? DEFAULT_MODE);
          }}
        />
        <Button
          variant="default"
          size="xs"
          onClick={() => {
            setShowsPassages(!showsPassages);
          }}
        >
          {showsPassages ? "Observations as read" : "Observations as passages"}
        </Button>
        <Legend mode={mode} scale={scale} />
      </Group>
      <Differences pair={pair} count={chosen.length} />
      <div className="samples" role="region" aria-label="Samples" tabIndex={0}>
        {samples.map((detail, place) => (
          <SampleColumn
            key={detail.summary.row}
            detail={detail}
            colours={colours[place] ?? []}
            isColoured={mode !== "author"}
            showsPassages={showsPassages}
            findGold={findGold}
            to={link(detail.summary)}
            isChosen={chosen.includes(String(detail.summary.sample))}
            onChoose={(isChosen) => {
              choose(detail.summary.sample, isChosen);
            }}
          />
        ))}
      </div>
    </div>
  );
}

/** What differs between the two samples that were chosen. */
function Differences({ pair, count }: { pair: readonly Detail[]; count: number }) {
  const [a, b] = pair;
  const diff = useMemo(
    () => (a === undefined || b === undefined ? null : diffTexts(withoutPrompt(a.blocks), withoutPrompt(b.blocks))),
    [a, b],
  );
  if (a === undefined || b === undefined || diff === null) {
    return (
      <Text size="sm" className="quiet" mb="xs">
        {count === 1
          ? "Choose a second sample to compare it with."
          : "Choose two samples to see what differs between them."}
      </Text>
    );
  }
  const isEqual = diff.unified.every(({ change }) => change === "same");
  return (
    <section className="card panel-like" aria-label="Differences" data-testid="differences">
      <h2>
        Sample {a.summary.sample} → sample {b.summary.sample}
      </h2>
      {isEqual ? (
        <p className="hint">The texts are equal.</p>
      ) : (
        <TextChanges parts={diff.unified} isWhole={diff.isWhole} />
      )}
    </section>
  );
}

// The two runs side by side, and the settings they differ in.
import { Anchor, Badge, Button, Group, Select, Stack, Table, Text, Title } from "@mantine/core";
import { Link } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { describeSteps } from "../runs/list";
import { DataTable, type Column } from "../ui/DataTable";
import { formatDuration, formatTime, Score, UNKNOWN } from "../ui/format";
import { StateBadge } from "../ui/StateBadge";
import { formatSetting } from "./curves";
import styles from "./compare.module.css";

type Run = Model<"RunRow">;
type Comparison = Model<"RunComparison">;

/** A or B, in the colour of its curves. */
export function Side({ name }: { name: "A" | "B" }) {
  return (
    <span className={styles.side} data-side={name}>
      {name}
    </span>
  );
}

interface ChooserProps {
  a: string;
  b: string;
  onChange: (a: string, b: string) => void;
}

/** Chooses the two runs. The same run twice compares its own validations. */
export function RunChooser({ a, b, onChange }: ChooserProps) {
  const query = api.useQuery("get", "/api/runs");
  const known = query.data?.runs.map(({ id }) => id) ?? [];
  const list = [...new Set([...known, a, b])].filter((id) => id !== "");
  const select = (name: "A" | "B", value: string, set: (id: string) => void) => (
    <Select
      label={`Run ${name}`}
      placeholder="Choose a run"
      size="xs"
      w={300}
      searchable
      data={list}
      value={value === "" ? null : value}
      onChange={(id) => {
        if (id !== null) set(id);
      }}
      allowDeselect={false}
    />
  );
  return (
    <Group align="flex-end" gap="sm">
      {select("A", a, (id) => {
        onChange(id, b);
      })}
      <Button
        variant="default"
        size="xs"
        onClick={() => {
          onChange(b, a);
        }}
        aria-label="Swap A and B"
      >
        ⇄
      </Button>
      {select("B", b, (id) => {
        onChange(a, id);
      })}
    </Group>
  );
}

const FACTS: [string, (run: Run) => React.ReactNode][] = [
  ["State", ({ state }) => <StateBadge state={state} />],
  ["Model", ({ model }) => model ?? UNKNOWN],
  ["Algorithm", ({ algorithm }) => algorithm ?? UNKNOWN],
  ["Steps", describeSteps],
  ["Started", ({ started }) => formatTime(started)],
  ["Duration", ({ duration_s }) => formatDuration(duration_s)],
  [
    "Best EM, greedy",
    ({ best_em, best_label }) =>
      best_em === null ? (
        UNKNOWN
      ) : (
        <>
          <Score value={best_em.mean} low={best_em.low} high={best_em.high} />{" "}
          <span className="quiet">in ‘{best_label}’</span>
        </>
      ),
  ],
  ["Note", ({ notes }) => (notes.note === "" ? UNKNOWN : notes.note)],
];

function describeDigests({ digests_equal, first_difference }: Comparison): string | null {
  if (digests_equal === null) return null;
  if (digests_equal) return "Tokens and weights of both runs are equal to the bit, as far as both went.";
  return `Tokens or weights differ from step ${first_difference ?? UNKNOWN} on.`;
}

export function Facts({ comparison }: { comparison: Comparison }) {
  const { a, b } = comparison;
  const digests = describeDigests(comparison);
  return (
    <div className={`card ${styles.facts ?? ""}`} role="region" aria-label="Both runs" tabIndex={0}>
      <Table withRowBorders={false} verticalSpacing={3} aria-label="Both runs">
        <Table.Thead>
          <Table.Tr>
            <Table.Td />
            {(["A", "B"] as const).map((name) => {
              const run = name === "A" ? a : b;
              return (
                <Table.Th key={name} scope="col">
                  <Side name={name} />{" "}
                  <Anchor component={Link} to={paths.run(run.id)} style={{ overflowWrap: "anywhere" }}>
                    {run.id}
                  </Anchor>
                </Table.Th>
              );
            })}
          </Table.Tr>
        </Table.Thead>
        <Table.Tbody>
          {FACTS.map(([name, show]) => (
            <Table.Tr key={name}>
              <Table.Th scope="row" className="quiet" fw={400}>
                {name}
              </Table.Th>
              <Table.Td>{show(a)}</Table.Td>
              <Table.Td>{show(b)}</Table.Td>
            </Table.Tr>
          ))}
        </Table.Tbody>
      </Table>
      {digests !== null && (
        <Text size="sm" p="xs">
          {digests}
        </Text>
      )}
    </div>
  );
}

type Setting = Model<"SettingDifference">;

const COLUMNS: Column<Setting>[] = [
  {
    id: "name",
    header: "Setting",
    cell: ({ name }) => <span className="mono">{name}</span>,
    sortValue: ({ name }) => name,
  },
  { id: "a", header: "A", cell: ({ a }) => <span className="mono">{formatSetting(a)}</span> },
  { id: "b", header: "B", cell: ({ b }) => <span className="mono">{formatSetting(b)}</span> },
];

export function Settings({ differences }: { differences: Setting[] }) {
  return (
    <Stack gap="xs" component="section" aria-labelledby="settings">
      <Title order={2} size="h4" id="settings">
        Settings{" "}
        <Badge variant="default" size="sm">
          {differences.length === 1 ? "1 differs" : `${differences.length} differ`}
        </Badge>
      </Title>
      {differences.length === 0 ? (
        <Text size="sm">Both runs have the same settings.</Text>
      ) : (
        <DataTable
          label="Settings that differ"
          rows={differences}
          columns={COLUMNS}
          rowKey={({ name }) => name}
          rowHeight={30}
          maxHeight={340}
          hotkeys={false}
        />
      )}
    </Stack>
  );
}

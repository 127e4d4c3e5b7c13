import { SimpleGrid, Table, Text, TextInput } from "@mantine/core";
import { useState } from "react";
import { formatNumber, formatScore } from "../ui/format";

type Metrics = Record<string, number | null>;

const SHARE = (value: number | null) => formatScore(value);

/** What a reader looks at first: name of the metric, label, format. */
const TILES: [string, string, (value: number | null) => string][] = [
  ["reward_mean", "reward", (value) => formatNumber(value, 3)],
  ["em_mean", "EM of sampled answers", SHARE],
  ["search_rate", "search rate", SHARE],
  ["format_rate", "right format", SHARE],
  ["truncated_rate", "truncated", SHARE],
  ["staleness_mean", "staleness", (value) => formatNumber(value, 3)],
  ["kl_ref", "KL to the reference", (value) => formatNumber(value, 3)],
  ["entropy", "entropy", (value) => formatNumber(value, 3)],
  ["grad_norm", "gradient norm", (value) => formatNumber(value, 3)],
  ["mismatch_max", "largest mismatch", (value) => formatNumber(value, 3)],
  ["response_tokens_mean", "tokens a response", (value) => formatNumber(value, 3)],
  ["tokens_per_s", "tokens/s", (value) => formatNumber(value, 3)],
];

function AllMetrics({ metrics }: { metrics: Metrics }) {
  const [text, setText] = useState("");
  const names = Object.keys(metrics)
    .filter((name) => name.toLowerCase().includes(text.trim().toLowerCase()))
    .toSorted();
  return (
    <>
      <TextInput
        size="xs"
        my="xs"
        maw={260}
        type="search"
        aria-label="Search the metrics"
        placeholder="Search the metrics"
        value={text}
        onChange={(event) => {
          setText(event.currentTarget.value);
        }}
      />
      <div className="metrics">
        <Table>
          <Table.Tbody>
            {names.map((name) => (
              <Table.Tr key={name}>
                <Table.Td className="mono">{name}</Table.Td>
                <Table.Td ta="right" className="number">
                  {formatNumber(metrics[name], 6)}
                </Table.Td>
              </Table.Tr>
            ))}
          </Table.Tbody>
        </Table>
      </div>
    </>
  );
}

/** The numbers of a step: the first ones as tiles, all of them folded. */
export function StepMetrics({ metrics }: { metrics: Metrics }) {
  const [isOpen, setOpen] = useState(false);
  return (
    <div>
      <SimpleGrid component="dl" cols={{ base: 2, xs: 3, md: 4, lg: 6 }} spacing="xs" m={0} data-testid="step-metrics">
        {TILES.filter(([name]) => name in metrics).map(([name, label, format]) => (
          <div key={name} className="card tile">
            <dt className="quiet">{label}</dt>
            <dd className="number">{format(metrics[name] ?? null)}</dd>
          </div>
        ))}
      </SimpleGrid>
      <details
        className="fold"
        onToggle={(event) => {
          setOpen(event.currentTarget.open);
        }}
      >
        <summary>
          <Text span size="sm">
            All {Object.keys(metrics).length} metrics
          </Text>
        </summary>
        {isOpen && <AllMetrics metrics={metrics} />}
      </details>
    </div>
  );
}

import { Button, Checkbox, Group, Menu, NativeSelect, Popover, Stack, Text, TextInput } from "@mantine/core";
import { useState } from "react";
import type { Model } from "../api/client";
import { formatNumber } from "../ui/format";
import { SearchInput } from "../ui/SearchInput";
import { applyPreset, EVERY_STEP, listChips, PRESETS, takeFilter, writeQuery, type ListQuery } from "./filter";

type Facets = Model<"Facets">;

interface Props {
  run: string;
  query: ListQuery;
  facets: Facets | undefined;
  onQuery: (query: ListQuery) => void;
  /** The same, for what is typed: it adds nothing to the history. */
  onText: (text: string) => void;
}

/** What the list is filtered by: where, text, and the rest behind a button; what is active stands below. */
export function FilterBar({ run, query, facets, onQuery, onText }: Props) {
  const chips = listChips(query);
  const places = facets?.places ?? [];
  const place = query.place ?? EVERY_STEP;
  const known = places.includes(place) || place === EVERY_STEP ? places : [place, ...places];
  const isOfSteps = place === EVERY_STEP || place.startsWith("step-");
  const patch = (change: ListQuery) => {
    onQuery(clean({ ...query, ...change }));
  };
  return (
    <Stack gap={8} data-testid="filters">
      <Group gap="xs">
        <NativeSelect
          size="xs"
          aria-label="Where"
          value={place}
          data={[{ value: EVERY_STEP, label: "all steps" }, ...known.map((value) => ({ value, label: value }))]}
          onChange={(event) => {
            patch({ place: event.currentTarget.value });
          }}
        />
        <SearchInput
          label="Search in questions and texts"
          value={query.text ?? ""}
          onChange={onText}
          w={{ base: "100%", sm: 280 }}
        />
        <Popover position="bottom-start" width={340} trapFocus withArrow shadow="md">
          <Popover.Target>
            <Button variant="default" size="xs" data-testid="more-filters">
              Filters
            </Button>
          </Popover.Target>
          <Popover.Dropdown mah="70vh" style={{ overflowY: "auto" }}>
            <MoreFilters query={query} facets={facets} onPatch={patch} />
          </Popover.Dropdown>
        </Popover>
        <Menu position="bottom-start" shadow="md">
          <Menu.Target>
            <Button variant="default" size="xs" data-testid="presets">
              Find …
            </Button>
          </Menu.Target>
          <Menu.Dropdown>
            {PRESETS.map((preset) => (
              <Menu.Item
                key={preset.label}
                onClick={() => {
                  onQuery(applyPreset(preset, query));
                }}
              >
                {preset.label}
              </Menu.Item>
            ))}
          </Menu.Dropdown>
        </Menu>
        <Button
          component="a"
          variant="default"
          size="xs"
          {...(isOfSteps
            ? {
                href: linkExport(run, query),
                download: true,
                title: "The trajectories that pass the filter, as a Parquet file",
              }
            : { "data-disabled": true, title: "Only trajectories of steps can be exported" })}
          data-testid="export"
        >
          Export
        </Button>
      </Group>
      {chips.length > 0 && (
        <Group gap={6} data-testid="chips">
          {chips.map(({ key, label, without }) => (
            <Button
              key={key}
              variant="default"
              size="compact-xs"
              radius="xl"
              fw={500}
              rightSection="✕"
              aria-label={`Remove the filter ${label}`}
              onClick={() => {
                onQuery(without);
              }}
            >
              {label}
            </Button>
          ))}
          <Button
            variant="subtle"
            size="compact-xs"
            onClick={() => {
              const { sort, order } = query;
              onQuery({ ...(sort !== undefined && { sort }), ...(order !== undefined && { order }) });
            }}
          >
            Clear all
          </Button>
        </Group>
      )}
    </Stack>
  );
}

/** Where the selection can be downloaded. */
export function linkExport(run: string, query: ListQuery): string {
  const search = writeQuery(takeFilter(query));
  for (const name of ["right", "truncated", "finished", "trained"]) {
    if (search.has(name)) search.set(name, search.get(name) === "1" ? "true" : "false");
  }
  const text = search.toString();
  return `/api/runs/${encodeURIComponent(run)}/trajectories.parquet${text === "" ? "" : `?${text}`}`;
}

/** Leaves out what lets everything pass. */
function clean(query: ListQuery): ListQuery {
  const isSet = (value: unknown) => value != null && value !== "" && !(Array.isArray(value) && value.length === 0);
  return Object.fromEntries(Object.entries(query).filter(([, value]) => isSet(value)));
}

interface MoreProps {
  query: ListQuery;
  facets: Facets | undefined;
  onPatch: (change: ListQuery) => void;
}

function MoreFilters({ query, facets, onPatch }: MoreProps) {
  const reasons = Object.entries(facets?.reasons ?? {});
  return (
    <Stack gap="sm">
      <Either
        label="Answer"
        yes="right"
        no="wrong"
        value={query.right}
        onChange={(right) => {
          onPatch({ right });
        }}
      />
      <Either
        label="Ended"
        yes="with an answer"
        no="without"
        value={query.finished}
        onChange={(finished) => {
          onPatch({ finished });
        }}
      />
      <Either
        label="Truncated"
        yes="yes"
        no="no"
        value={query.truncated}
        onChange={(truncated) => {
          onPatch({ truncated });
        }}
      />
      <Either
        label="Trained on"
        yes="yes"
        no="no"
        value={query.trained}
        onChange={(trained) => {
          onPatch({ trained });
        }}
      />
      <Between
        label="Step"
        bounds={facets?.steps}
        low={query.step_min}
        high={query.step_max}
        onChange={(step_min, step_max) => {
          onPatch({ step_min, step_max });
        }}
      />
      <Between
        label="Reward"
        bounds={facets?.reward}
        low={query.reward_min}
        high={query.reward_max}
        onChange={(reward_min, reward_max) => {
          onPatch({ reward_min, reward_max });
        }}
      />
      <Between
        label="Searches"
        bounds={facets?.searches}
        low={query.searches_min}
        high={query.searches_max}
        onChange={(searches_min, searches_max) => {
          onPatch({ searches_min, searches_max });
        }}
      />
      <Between
        label="Policy version"
        bounds={facets?.versions}
        low={query.version_min}
        high={query.version_max}
        onChange={(version_min, version_max) => {
          onPatch({ version_min, version_max });
        }}
      />
      <Several
        label="Status"
        values={facets?.statuses ?? {}}
        chosen={query.status ?? []}
        onChange={(status) => {
          onPatch({ status });
        }}
      />
      <Several
        label="Data source"
        values={facets?.sources ?? {}}
        chosen={query.source ?? []}
        onChange={(source) => {
          onPatch({ source });
        }}
      />
      {(reasons.length > 0 || query.reason) && (
        <NativeSelect
          size="xs"
          label="Reason"
          value={query.reason ?? ""}
          data={[
            { value: "", label: "any" },
            ...reasons.map(([value, count]) => ({ value, label: `${value} (${count})` })),
          ]}
          onChange={(event) => {
            onPatch({ reason: event.currentTarget.value });
          }}
        />
      )}
    </Stack>
  );
}

interface EitherProps {
  label: string;
  yes: string;
  no: string;
  value: boolean | null | undefined;
  onChange: (value: boolean | null) => void;
}

function Either({ label, yes, no, value, onChange }: EitherProps) {
  return (
    <Group justify="space-between" gap="xs">
      <Text size="sm">{label}</Text>
      <NativeSelect
        size="xs"
        aria-label={label}
        value={value === true ? "yes" : value === false ? "no" : ""}
        data={[
          { value: "", label: "any" },
          { value: "yes", label: yes },
          { value: "no", label: no },
        ]}
        onChange={(event) => {
          const chosen = event.currentTarget.value;
          onChange(chosen === "" ? null : chosen === "yes");
        }}
      />
    </Group>
  );
}

interface BetweenProps {
  label: string;
  bounds: Model<"Range"> | null | undefined;
  low: number | null | undefined;
  high: number | null | undefined;
  onChange: (low: number | null, high: number | null) => void;
}

function Between({ label, bounds, low, high, onChange }: BetweenProps) {
  return (
    <Group justify="space-between" gap="xs" wrap="nowrap">
      <Text size="sm">{label}</Text>
      <Group gap={4} wrap="nowrap">
        <Bound
          label={`${label}, at least`}
          hint={bounds?.low}
          value={low ?? null}
          onChange={(value) => {
            onChange(value, high ?? null);
          }}
        />
        <span className="quiet">–</span>
        <Bound
          label={`${label}, at most`}
          hint={bounds?.high}
          value={high ?? null}
          onChange={(value) => {
            onChange(low ?? null, value);
          }}
        />
      </Group>
    </Group>
  );
}

interface BoundProps {
  label: string;
  hint: number | undefined;
  value: number | null;
  onChange: (value: number | null) => void;
}

function Bound({ label, hint, value, onChange }: BoundProps) {
  const [typed, setTyped] = useState(value === null ? "" : String(value));
  const [known, setKnown] = useState(value);
  if (known !== value) {
    setKnown(value);
    setTyped(value === null ? "" : String(value));
  }
  const isNumber = typed.trim() === "" || Number.isFinite(Number(typed));
  const commit = () => {
    const next = typed.trim() === "" ? null : Number(typed);
    if (isNumber && next !== value) onChange(next);
  };
  return (
    <TextInput
      size="xs"
      w={84}
      inputMode="decimal"
      aria-label={label}
      placeholder={hint === undefined ? "" : formatNumber(hint, 3)}
      value={typed}
      error={!isNumber}
      onChange={(event) => {
        setTyped(event.currentTarget.value);
      }}
      onBlur={commit}
      onKeyDown={(event) => {
        if (event.key === "Enter") commit();
      }}
    />
  );
}

interface SeveralProps {
  label: string;
  values: Record<string, number>;
  chosen: readonly string[];
  onChange: (chosen: string[]) => void;
}

function Several({ label, values, chosen, onChange }: SeveralProps) {
  const all = { ...Object.fromEntries(chosen.map((value) => [value, 0])), ...values };
  if (Object.keys(all).length < 2 && chosen.length === 0) return null;
  return (
    <Checkbox.Group size="xs" label={label} value={[...chosen]} onChange={onChange}>
      <Stack gap={4} mt={4}>
        {Object.entries(all).map(([value, count]) => (
          <Checkbox key={value} size="xs" value={value} label={`${value} (${formatNumber(count)})`} />
        ))}
      </Stack>
    </Checkbox.Group>
  );
}

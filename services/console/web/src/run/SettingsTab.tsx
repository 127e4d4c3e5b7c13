import { Badge, Group, Stack, Switch, Text } from "@mantine/core";
import { useMemo } from "react";
import type { Model } from "../api/client";
import { DataTable, type Column } from "../ui/DataTable";
import { SearchInput } from "../ui/SearchInput";
import { asFlag, asText, useSearchParam } from "../ui/searchParams";
import { EmptyState } from "../ui/states";
import { listSettings, searchSettings, type Setting } from "./settings";

const COLUMNS: Column<Setting>[] = [
  {
    id: "name",
    header: "setting",
    cell: ({ name, isChanged }) => (
      <span className="mono">
        {isChanged ? <b>{name}</b> : name}{" "}
        {isChanged && (
          <Badge variant="default" size="xs">
            changed
          </Badge>
        )}
      </span>
    ),
  },
  { id: "value", header: "value", cell: ({ value }) => <span className="mono">{value}</span> },
];

/** The settings of a run, those first that differ from the defaults. */
export function SettingsTab({ detail }: { detail: Model<"RunDetail"> }) {
  const [text, setText] = useSearchParam("q", asText, "");
  const [onlyChanged, setOnlyChanged] = useSearchParam("changed", asFlag, false);
  const all = useMemo(() => listSettings(detail.settings, detail.changed), [detail.settings, detail.changed]);
  const shown = useMemo(() => searchSettings(all, text, onlyChanged), [all, text, onlyChanged]);
  if (all.length === 0)
    return (
      <EmptyState title="The run has no settings.yaml">Only a run of ‘forage up’ or ‘forage demo’ has one.</EmptyState>
    );
  return (
    <Stack gap="xs">
      <Group gap="md">
        <SearchInput label="Search the settings" value={text} onChange={setText} w={260} />
        <Switch
          size="xs"
          label="Only what differs from the defaults"
          checked={onlyChanged}
          onChange={(event) => {
            setOnlyChanged(event.currentTarget.checked);
          }}
        />
        <Text size="sm" className="quiet number">
          {shown.length} of {all.length}
        </Text>
      </Group>
      <DataTable
        label="Settings"
        rows={shown}
        columns={COLUMNS}
        rowKey={({ name }) => name}
        rowHeight={32}
        rowData={({ name }) => ({ "data-setting": name })}
        empty={<EmptyState title="No setting has these words">Search less.</EmptyState>}
      />
    </Stack>
  );
}

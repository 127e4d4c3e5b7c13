import { Select } from "@mantine/core";
import { useNavigate } from "react-router";
import { api } from "../api/client";
import { paths } from "./paths";

/** Goes from the run that is shown to another one. */
export function RunSwitcher({ run }: { run: string | undefined }) {
  const query = api.useQuery("get", "/api/runs", undefined, { enabled: run !== undefined });
  const navigate = useNavigate();
  if (run === undefined) return null;
  const known = query.data?.runs.map(({ id }) => id) ?? [];
  return (
    <Select
      aria-label="Run"
      size="xs"
      w={300}
      maw="52vw"
      searchable
      data={known.includes(run) ? known : [run, ...known]}
      value={run}
      allowDeselect={false}
      nothingFoundMessage="No run is called so"
      onChange={(id) => {
        if (id !== null) void navigate(paths.run(id));
      }}
      data-testid="run-switcher"
    />
  );
}

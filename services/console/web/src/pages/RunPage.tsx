import { Anchor, Stack, Tabs } from "@mantine/core";
import { Link, useParams } from "react-router";
import { api, type Model } from "../api/client";
import { paths } from "../app/paths";
import { EventsTab } from "../run/EventsTab";
import { Figures } from "../run/Figures";
import "../run/run.css";
import { RunHeader } from "../run/RunHeader";
import { SettingsTab } from "../run/SettingsTab";
import { Tiles } from "../run/Tiles";
import { Validations } from "../run/Validations";
import { Notice, type Tone } from "../ui/Notice";
import { Page } from "../ui/Page";
import { asOneOf, useSearchParam } from "../ui/searchParams";
import { QueryState } from "../ui/states";
import { StateBadge } from "../ui/StateBadge";

const TABS = ["curves", "validations", "settings", "events"] as const;
const asTab = asOneOf(TABS);
const TONES: Record<string, Tone> = { error: "bad", warning: "warn", info: "info" };

function Warnings({ run, detail }: { run: string; detail: Model<"RunDetail"> }) {
  if (detail.warnings.length === 0) return null;
  return (
    <Stack gap={6} role="group" aria-label="Warnings" data-testid="warnings">
      {detail.warnings.map(({ severity, text, step }, index) => (
        <Notice key={`${index} ${text}`} tone={TONES[severity] ?? "info"} testId="warning">
          {step !== null && step > 0 && (
            <>
              <Anchor component={Link} to={paths.step(run, step)} size="sm" underline="always">
                step {step}
              </Anchor>
              :{" "}
            </>
          )}
          {text}
        </Notice>
      ))}
    </Stack>
  );
}

function Run({ run, detail }: { run: string; detail: Model<"RunDetail"> }) {
  const [tab, setTab] = useSearchParam("tab", asTab, "curves");
  return (
    <Stack gap="md">
      <RunHeader detail={detail} />
      <Tiles detail={detail} />
      <Warnings run={run} detail={detail} />
      <Tabs
        value={tab}
        onChange={(value) => {
          setTab(asTab.read(value ?? "") ?? "curves");
        }}
        keepMounted={false}
        color="var(--accent)"
      >
        <Tabs.List mb="sm">
          <Tabs.Tab value="curves">Curves</Tabs.Tab>
          <Tabs.Tab value="validations">Validations</Tabs.Tab>
          <Tabs.Tab value="settings">Settings</Tabs.Tab>
          <Tabs.Tab value="events">Events</Tabs.Tab>
        </Tabs.List>
        <Tabs.Panel value="curves">
          <Figures run={run} detail={detail} />
        </Tabs.Panel>
        <Tabs.Panel value="validations">
          <Validations run={run} rows={detail.validations} />
        </Tabs.Panel>
        <Tabs.Panel value="settings">
          <SettingsTab detail={detail} />
        </Tabs.Panel>
        <Tabs.Panel value="events">
          <EventsTab run={run} marks={detail.marks} />
        </Tabs.Panel>
      </Tabs>
    </Stack>
  );
}

export default function RunPage() {
  const { run = "" } = useParams();
  const query = api.useQuery("get", "/api/runs/{run}", { params: { path: { run } } });
  return (
    <Page
      title={run}
      crumbs={[{ label: "Runs", to: paths.runs() }]}
      aside={query.data !== undefined && <StateBadge state={query.data.run.state} />}
    >
      <QueryState query={query}>{(detail) => <Run key={run} run={run} detail={detail} />}</QueryState>
    </Page>
  );
}

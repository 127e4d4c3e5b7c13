import { ActionIcon, AppShell, Box, Burger, Group, NavLink, Text } from "@mantine/core";
import { useDisclosure } from "@mantine/hooks";
import { useEffect } from "react";
import { Link, Outlet, useLocation, useNavigate, useParams } from "react-router";
import { ConnectionNotice, useLiveRuns } from "../api/events";
import { useHotkeys, type Hotkey } from "../ui/hotkeys";
import { HelpOverlay } from "./HelpOverlay";
import { paths } from "./paths";
import { RunSwitcher } from "./RunSwitcher";
import { ThemeToggle } from "./ThemeToggle";

interface Section {
  key: string;
  label: string;
  to: string;
  /** Other addresses below it. */
  also?: string;
}

function listSections(run: string): Section[] {
  return [
    { key: "l", label: "Live", to: paths.run(run), also: `${paths.run(run)}/steps` },
    { key: "t", label: "Trajectories", to: paths.trajectories(run), also: `${paths.run(run)}/groups` },
    { key: "q", label: "Questions", to: paths.questions(run) },
    { key: "h", label: "Health", to: paths.health(run) },
    { key: "a", label: "Ask", to: paths.ask(run) },
  ];
}

function isWithin(path: string, { to, also, key }: Section): boolean {
  const begins = (address: string) => path === address || path.startsWith(`${address}/`);
  return (key === "l" ? path === to : begins(to)) || (also !== undefined && begins(also));
}

/** The frame of every page: header, navigation within a run, connection, help. */
export function Layout() {
  const { run } = useParams();
  const { pathname } = useLocation();
  const navigate = useNavigate();
  const [isOpen, menu] = useDisclosure(false);
  const [helps, help] = useDisclosure(false);
  const sections = run === undefined ? [] : listSections(run);
  const closeMenu = menu.close;
  useEffect(() => {
    closeMenu();
  }, [pathname, closeMenu]);

  useLiveRuns(run ?? null);

  const go = (to: string) => () => void navigate(to);
  const hotkeys: Hotkey[] = [
    { keys: "?", label: "Show the keys of this page", run: help.toggle },
    { keys: "g r", label: "Go to all runs", run: go(paths.runs()) },
    { keys: "g c", label: "Go to two runs", run: go(paths.compare(run)) },
    ...sections.map(({ key, label, to }) => ({ keys: `g ${key}`, label: `Go to ${label}`, run: go(to) })),
  ];
  useHotkeys(hotkeys);

  return (
    <AppShell
      header={{ height: 52 }}
      {...(run !== undefined && { navbar: { width: 168, breakpoint: "sm", collapsed: { mobile: !isOpen } } })}
      padding="md"
      transitionDuration={0}
    >
      <a href="#content" className="skip-link">
        Skip to the content
      </a>
      <AppShell.Header bg="var(--card)">
        <Group h="100%" px="md" gap="sm" wrap="nowrap" justify="space-between">
          <Group gap="sm" wrap="nowrap" miw={0}>
            {run !== undefined && (
              <Burger
                opened={isOpen}
                onClick={menu.toggle}
                hiddenFrom="sm"
                size="sm"
                aria-label={isOpen ? "Close the navigation" : "Open the navigation"}
              />
            )}
            <Text component={Link} to={paths.runs()} className="brand" data-testid="home">
              Forage
            </Text>
            <RunSwitcher run={run} />
          </Group>
          <Group gap={6} wrap="nowrap">
            <ActionIcon variant="default" size="lg" onClick={help.open} aria-label="Keys of this page (?)">
              ?
            </ActionIcon>
            <ThemeToggle />
          </Group>
        </Group>
      </AppShell.Header>
      {run !== undefined && (
        <AppShell.Navbar p="xs" aria-label="This run" bg="var(--card)">
          {sections.map((section) => (
            <NavLink
              key={section.key}
              component={Link}
              to={section.to}
              label={section.label}
              active={isWithin(pathname, section)}
              aria-current={isWithin(pathname, section) ? "page" : undefined}
            />
          ))}
        </AppShell.Navbar>
      )}
      <AppShell.Main id="content" tabIndex={-1}>
        <ConnectionNotice />
        <Box maw={1500} mx="auto">
          <Outlet />
        </Box>
      </AppShell.Main>
      <HelpOverlay opened={helps} onClose={help.close} />
    </AppShell>
  );
}

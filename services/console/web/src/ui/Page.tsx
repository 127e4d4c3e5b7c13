import { Anchor, Breadcrumbs, Group, Stack, Title } from "@mantine/core";
import { useEffect, type ReactNode } from "react";
import { Link } from "react-router";

export interface Crumb {
  label: string;
  to: string;
}

interface Props {
  title: string;
  crumbs?: Crumb[];
  /** Beside the title: badges, buttons. */
  aside?: ReactNode;
  children: ReactNode;
}

/** A page with its title, which is the tab's too, and the way back. */
export function Page({ title, crumbs = [], aside, children }: Props) {
  useEffect(() => {
    document.title = `${title} · Forage`;
  }, [title]);
  return (
    <Stack gap="md">
      <div>
        {crumbs.length > 0 && (
          <nav aria-label="Breadcrumb">
            <Breadcrumbs mb={4} styles={{ root: { flexWrap: "wrap" } }}>
              {crumbs.map(({ label, to }) => (
                <Anchor key={to} component={Link} to={to} size="sm">
                  {label}
                </Anchor>
              ))}
            </Breadcrumbs>
          </nav>
        )}
        <Group justify="space-between" gap="sm">
          <Title order={1} size="h2" style={{ overflowWrap: "anywhere" }}>
            {title}
          </Title>
          {aside}
        </Group>
      </div>
      {children}
    </Stack>
  );
}

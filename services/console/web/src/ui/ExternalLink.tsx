import { Anchor, Text } from "@mantine/core";

/** A link out of the console, to an address that is data; text alone where the address is not one of HTTP or HTTPS. */
export function ExternalLink({ address, children }: { address: string; children: string }) {
  return isWebAddress(address) ? (
    // eslint-disable-next-line no-restricted-syntax -- the scheme was checked
    <Anchor href={address} target="_blank" rel="noreferrer" className="mono" size="sm">
      {children}
    </Anchor>
  ) : (
    <Text span className="mono" size="sm">
      {children}
    </Text>
  );
}

function isWebAddress(address: string): boolean {
  return URL.canParse(address) && ["http:", "https:"].includes(new URL(address).protocol);
}

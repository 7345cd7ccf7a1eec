//! IPsec as `ip xfrm` shows it.

use std::collections::BTreeSet;

use weft_bench::sandbox::Netns;

/// The high half of the reqid on every SA and policy of Weft's.
const TAG: u32 = 0x5745;

/// One SA.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Sa {
    /// The source of its packets.
    pub source: String,
    /// Their destination.
    pub destination: String,
    /// Its SPI.
    pub spi: u32,
    /// Its block in the output of `ip xfrm state`.
    pub text: String,
}

/// No peer chooses an SPI up to here (RFC 4303 section 2.1). The kernel engine uses one for the
/// states by which it finds out what the kernel can do: each is there for a moment.
const RESERVED_SPI_MAX: u32 = 255;

/// SAs of a namespace that carry Weft's tag and that packets may have.
///
/// # Errors
/// Returns an error if `ip` fails.
pub fn own_states(netns: &Netns) -> anyhow::Result<Vec<Sa>> {
    Ok(parse(&netns.ip("xfrm state")?.stdout).into_iter().filter(is_own).collect())
}

/// Policies of a namespace that carry Weft's tag, as `ip xfrm policy` shows them.
///
/// # Errors
/// Returns an error if `ip` fails.
pub fn own_policies(netns: &Netns) -> anyhow::Result<Vec<String>> {
    let text = netns.ip("xfrm policy")?.stdout;
    Ok(blocks(&text).into_iter().filter(|block| is_tagged(block)).collect())
}

/// The SPIs of a namespace's SAs of Weft's.
///
/// # Errors
/// Returns an error if `ip` fails.
pub fn own_spis(netns: &Netns) -> anyhow::Result<BTreeSet<u32>> {
    Ok(own_states(netns)?.into_iter().map(|sa| sa.spi).collect())
}

/// The objects that `ip xfrm` flushes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Flush {
    /// All SAs.
    States,
    /// All policies.
    Policies,
    /// Policies and then SAs.
    Both,
}

impl Flush {
    /// Every kind.
    pub const ALL: [Self; 3] = [Self::States, Self::Policies, Self::Both];

    /// Flushes them, by `ip`.
    ///
    /// # Errors
    /// Returns an error if `ip` fails.
    pub fn carry_out(self, netns: &Netns) -> anyhow::Result<()> {
        let (states, policies) = ("ip xfrm state flush", "ip xfrm policy flush");
        let script = match self {
            Self::States => states.to_owned(),
            Self::Policies => policies.to_owned(),
            // In one shell, so that the daemon cannot repair one before the other is gone.
            Self::Both => format!("{policies}; {states}"),
        };
        netns.exec(&["bash", "-c", &script])?.success()?;
        Ok(())
    }
}

fn is_own(sa: &Sa) -> bool {
    is_tagged(&sa.text) && sa.spi > RESERVED_SPI_MAX
}

fn is_tagged(text: &str) -> bool {
    text.split("reqid ").skip(1).any(|rest| {
        let digits = rest.split(|letter: char| !letter.is_ascii_digit()).next();
        digits.and_then(|digits| digits.parse::<u32>().ok()).is_some_and(|id| id >> 16 == TAG)
    })
}

/// The paragraphs of `ip xfrm`'s output: each begins at a line's first column.
fn blocks(text: &str) -> Vec<String> {
    let mut blocks: Vec<String> = Vec::new();
    for line in text.lines() {
        match blocks.last_mut() {
            Some(block) if line.starts_with(char::is_whitespace) => {
                block.push('\n');
                block.push_str(line);
            }
            _ => blocks.push(line.to_owned()),
        }
    }
    blocks
}

fn parse(text: &str) -> Vec<Sa> {
    let after = |block: &str, key: &str| {
        let mut words = block.split_whitespace();
        words.find(|word| *word == key)?;
        words.next().map(str::to_owned)
    };
    let sa = |block: String| {
        let spi = after(&block, "spi")?;
        Some(Sa {
            source: after(&block, "src")?,
            destination: after(&block, "dst")?,
            spi: u32::from_str_radix(spi.trim_start_matches("0x"), 16).ok()?,
            text: block,
        })
    };
    blocks(text).into_iter().filter_map(sa).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_of_ip_xfrm_are_read() {
        let text = "src 192.0.2.1 dst 192.0.2.2\n\tproto esp spi 0x8000abcd reqid 1464157780(0x57454654) mode transport\n\treplay-window 0 flag esn\nsrc 2001:db8::2 dst 2001:db8::1\n\tproto esp spi 0x00000101 reqid 77(0x0000004d) mode transport\n";
        let found = parse(text);
        assert_eq!(found.len(), 2);
        assert_eq!((found[0].spi, found[0].destination.as_str()), (0x8000_abcd, "192.0.2.2"));
        assert!(is_own(&found[0]) && !is_own(&found[1]));
        let trial = Sa { spi: 253, ..found[0].clone() };
        assert!(!is_own(&trial), "a state that finds out what the kernel can do");
        let lane = "proto esp spi 0x00000000 reqid 1464139777 mode transport";
        assert!(is_tagged(lane), "a set of lanes has its own number under the tag");
    }
}

//! Rings of tests: how much of a lab runs.

/// How much of a lab runs; each ring holds those before it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum Ring {
    /// Before every push: a test of each behaviour, within minutes.
    Core,
    /// Before an issue is called resolved: every test, full matrices.
    #[default]
    Full,
    /// Full lengths, which take hours.
    Soak,
}

/// Whether a pattern fits a whole name; `*` stands for any text.
pub(crate) fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|first| name.strip_prefix(first)) else {
        return false;
    };
    // The last part must end the name, even if it also occurs earlier.
    let Some(last) = parts.next_back() else { return rest.is_empty() };
    let mut follows = |part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + str::len(part)..];
            true
        }
        None => false,
    };
    parts.all(&mut follows) && rest.ends_with(last)
}

/// Whether one of these patterns fits a name.
pub(crate) fn is_one_of(patterns: &[&str], name: &str) -> bool {
    patterns.iter().any(|pattern| fits(pattern, name))
}

/// Checks that each pattern fits a test; otherwise its test no longer exists.
///
/// # Errors
/// The pattern, and the list that names it.
pub(crate) fn each_fits(patterns: &[&str], names: &[String], of: &str) -> anyhow::Result<()> {
    for pattern in patterns {
        anyhow::ensure!(
            names.iter().any(|name| fits(pattern, name)),
            "no test fits {pattern}, which {of} names"
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_fit_whole_names() {
        for (pattern, name, wanted) in [
            ("net_*", "net_mtu::a", true),
            ("net_*", "vm_net_mtu::a", false),
            ("net_mtu::a", "net_mtu::a", true),
            ("net_mtu::a", "net_mtu::ab", false),
            ("*::ping*", "net_x::ping_all", true),
            ("net_*::b", "net_x::a::b", true),
            ("net_*::b", "net_x::bc", false),
            ("net_*::b", "net_x::b::b", true),
            ("*_udp", "net_x::by_udp_in_udp", true),
            ("a*a", "a", false),
            ("*", "", true),
        ] {
            assert_eq!(fits(pattern, name), wanted, "{pattern} {name}");
        }
    }

    #[test]
    fn a_pattern_without_a_test_is_an_error() {
        let names = ["net_a::b".to_owned()];
        assert!(each_fits(&["net_*"], &names, "the list").is_ok());
        let error = each_fits(&["net_*", "net_c::*"], &names, "the list").map(drop);
        assert!(error.is_err_and(|error| error.to_string().contains("net_c::*")));
    }
}

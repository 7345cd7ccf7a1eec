//! Commands and options of Weft's that documents show, and whether the program has them.

use clap::CommandFactory;
use weft::cli::Cli;

/// The mark of a block of code.
const FENCE: &str = "```";
const PROGRAM: &str = "weft ";

/// A text that a document shows as code, and its line.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shown {
    /// The line, counted from 1.
    pub line: usize,
    /// The text; for a command without the program's name.
    pub text: String,
}

/// The commands of Weft's that a document shows, in blocks and in spans.
#[must_use]
pub fn commands(document: &str) -> Vec<Shown> {
    let mut found = Vec::new();
    for (line, text, is_block) in code(document) {
        // A remark behind a command of a block.
        let text = if is_block { text.split("  #").next().unwrap_or_default() } else { &text };
        if let Some(command) = text.strip_prefix(PROGRAM) {
            found.push(Shown { line, text: command.trim().to_owned() });
        }
    }
    found
}

/// The long options that a document shows as spans of their own.
#[must_use]
pub fn options(document: &str) -> Vec<Shown> {
    let spans = code(document).into_iter().filter(|(_, text, is_block)| {
        !is_block && text.starts_with("--") && !text.contains(char::is_whitespace)
    });
    spans.map(|(line, text, _)| Shown { line, text }).collect()
}

/// Why Weft does not have a command, if so: a word that is no command of it, or an option that is none.
#[must_use]
pub fn fault(command: &str) -> Option<String> {
    let mut at = Cli::command();
    at.build();
    let mut takes_value = false;
    for word in command.split_whitespace() {
        if word == "--" {
            break;
        }
        if let Some(option) = word.strip_prefix("--") {
            let found = at.get_arguments().find(|argument| argument.get_long() == Some(option));
            let Some(found) = found else {
                return Some(format!("weft {command}: no option --{option}"));
            };
            takes_value = found.get_action().takes_values();
        } else if !std::mem::take(&mut takes_value) {
            match at.find_subcommand(word).cloned() {
                Some(command) => at = command,
                None if at.get_positionals().next().is_some() => {}
                None => return Some(format!("weft {command}: {word} is no command")),
            }
        }
    }
    None
}

/// Whether any command of Weft's has this option, with its dashes.
#[must_use]
pub fn has_option(option: &str) -> bool {
    fn has(command: &clap::Command, name: &str) -> bool {
        command.get_arguments().any(|argument| argument.get_long() == Some(name))
            || command.get_subcommands().any(|command| has(command, name))
    }
    let mut all = Cli::command();
    all.build();
    option.strip_prefix("--").is_some_and(|name| has(&all, name))
}

/// The lines of blocks and the spans of text that a document shows as code, and whether each is of a block. A line that
/// ends with a backslash goes on in the next one.
fn code(document: &str) -> Vec<(usize, String, bool)> {
    let mut found: Vec<(usize, String, bool)> = Vec::new();
    let (mut in_block, mut goes_on) = (false, false);
    for (number, line) in (1..).zip(document.lines()) {
        if line.trim_start().starts_with(FENCE) {
            (in_block, goes_on) = (!in_block, false);
        } else if in_block {
            let (text, more) = line.strip_suffix('\\').map_or((line, false), |text| (text, true));
            match found.last_mut().filter(|_| goes_on) {
                Some((_, begun, _)) => begun.push_str(text),
                None => found.push((number, text.to_owned(), true)),
            }
            goes_on = more;
        } else {
            // Every second piece lies between two marks.
            let spans = line.split('`').skip(1).step_by(2);
            found.extend(spans.map(|span| (number, span.to_owned(), false)));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(line: usize, text: &str) -> Shown {
        Shown { line, text: text.to_owned() }
    }

    #[test]
    fn commands_are_found_in_blocks_and_spans() {
        let text = "run `weft ps` or `weave ps`, `weft`:\n```sh\nweft status peers   # all\nip a\n```\n\
                    | `--mtu` | `weft hide` |\n";
        let found = [shown(1, "ps"), shown(3, "status peers"), shown(6, "hide")];
        assert_eq!(commands(text), found);
        assert_eq!(options(text), [shown(6, "--mtu")]);
        let text = "```\nweft status \\\n  --json\nweft ps\n```\n";
        assert_eq!(commands(text), [shown(2, "status   --json"), shown(4, "ps")]);
    }

    #[test]
    fn a_command_or_option_that_weft_does_not_have_is_named() {
        for good in [
            "ps",
            "status connections",
            "launch HOST…",
            "network create --subnet 10.2.1.0/24 NAME",
            "run -- bash --login",
            "dco new-peer tun0 5 --udp 0.0.0.0:1194",
            "--help",
        ] {
            assert_eq!(fault(good), None);
        }
        for (bad, why) in [
            ("rmpeer HOST", "rmpeer is no command"),
            ("network make shop", "make is no command"),
            ("attach --nets shop C", "no option --nets"),
            ("ps CONTAINER", "CONTAINER is no command"),
            ("stop --force", "no option --force"),
        ] {
            assert!(fault(bad).is_some_and(|fault| fault.ends_with(why)), "{bad}");
        }
        assert!(has_option("--port-mode") && !has_option("--no-fastdp"));
    }
}

//! One pass over a file: what is alike for servers and clients.

use std::borrow::Cow;

use super::lexer::{self, Directive};
use super::table::{self, Rule};
use super::{Files, ImportLine, Outcome, Verdict};

/// How deep files may name each other by `config`.
pub const CONFIG_DEPTH_MAX: usize = 10;

/// Most lines of a report, over all files.
const REPORT_LINES_MAX: usize = 65_536;

/// Whose file it is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    Server,
    Client,
}

/// Takes one directive over.
pub(super) trait Apply {
    fn apply(&mut self, directive: &Directive, files: &mut dyn Files) -> Outcome;
}

/// A pass: the report so far, and what earlier lines mean for later ones.
pub(super) struct Walk<'a> {
    kind: Kind,
    files: &'a mut dyn Files,
    lines: Vec<ImportLine>,
    /// Names of `ignore-unknown-option`.
    ignored: Vec<String>,
    /// The folder of relative paths (`cd`).
    folder: Option<String>,
}

/// Other files, from the folder that the configuration chose.
struct InFolder<'a> {
    folder: &'a str,
    files: &'a mut dyn Files,
}

impl Files for InFolder<'_> {
    fn read(&mut self, path: &str) -> Result<String, String> {
        if path.starts_with('/') {
            return self.files.read(path);
        }
        self.files.read(&format!("{}/{path}", self.folder.trim_end_matches('/')))
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(kind: Kind, files: &'a mut dyn Files) -> Self {
        Self { kind, files, lines: Vec::new(), ignored: Vec::new(), folder: None }
    }

    /// Reads a text, and the files that it names by `config`. Returns the report, and the folder that relative paths
    /// are seen from (`cd`).
    pub(super) fn run(
        mut self,
        text: &str,
        target: &mut dyn Apply,
    ) -> (Vec<ImportLine>, Option<String>) {
        self.file(None, text, 0, target);
        (self.lines, self.folder)
    }

    fn file(&mut self, file: Option<&str>, text: &str, depth: usize, target: &mut dyn Apply) {
        for read in lexer::read(text) {
            if self.lines.len() >= REPORT_LINES_MAX {
                return;
            }
            let (line, shown, outcome) = match &read {
                Ok(directive) => {
                    let outcome = self.directive(directive, depth, target);
                    (directive.line, directive.shown(), outcome)
                }
                Err(bad) => (bad.line, String::new(), Err(bad.error.to_string())),
            };
            let verdict = outcome.unwrap_or_else(|why| Verdict::Refused(Cow::Owned(why)));
            self.lines.push(ImportLine {
                file: file.map(str::to_owned),
                line,
                text: shown,
                verdict,
            });
        }
    }

    fn directive(
        &mut self,
        directive: &Directive,
        depth: usize,
        target: &mut dyn Apply,
    ) -> Outcome {
        if directive.values.first().is_some_and(|value| value == "[inline]") {
            return super::nothing("the block of this name says it");
        }
        match directive.name.as_str() {
            "config" => self.include(directive, depth, target),
            "cd" => {
                self.folder = Some(super::Args(directive).text(0, "a folder")?.to_owned());
                super::TAKEN
            }
            "ignore-unknown-option" => {
                self.ignored.extend(directive.values.iter().cloned());
                super::TAKEN
            }
            "setenv" if directive.values.first().is_some_and(|value| value == "opt") => {
                let mut inner = directive.clone();
                inner.values.remove(0);
                if inner.values.is_empty() {
                    return super::nothing("it sets nothing");
                }
                inner.name = inner.values.remove(0);
                match table::row(&inner.name) {
                    Some(_) => self.known(&inner, target),
                    None => super::nothing("it may be unknown (setenv opt)"),
                }
            }
            _ => self.known(directive, target),
        }
    }

    fn include(&mut self, directive: &Directive, depth: usize, target: &mut dyn Apply) -> Outcome {
        if depth + 1 >= CONFIG_DEPTH_MAX {
            return Err(format!(
                "files name each other more than {CONFIG_DEPTH_MAX} deep: join them"
            ));
        }
        let text = match &self.folder {
            Some(folder) => {
                super::Args(directive).content(&mut InFolder { folder, files: self.files })?
            }
            None => super::Args(directive).content(self.files)?,
        };
        let name = directive.values.first().map_or("config", String::as_str);
        self.file(Some(name), &text, depth + 1, target);
        super::TAKEN
    }

    fn known(&mut self, directive: &Directive, target: &mut dyn Apply) -> Outcome {
        let Some((_, server, client)) = table::row(&directive.name) else {
            if self.ignored.contains(&directive.name) {
                return super::nothing("it may be unknown (ignore-unknown-option)");
            }
            return Err(format!("OpenVPN has no directive {:?}: correct it", directive.name));
        };
        let rule = if self.kind == Kind::Server { server } else { client };
        match *rule {
            Rule::Nothing(why) => super::nothing(why),
            Rule::Refuse(why) => Ok(Verdict::Refused(Cow::Borrowed(why))),
            Rule::Take => match &self.folder {
                Some(folder) => {
                    target.apply(directive, &mut InFolder { folder, files: self.files })
                }
                None => target.apply(directive, self.files),
            },
        }
    }
}

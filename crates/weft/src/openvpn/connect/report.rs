//! What the user is told: lines on standard error, and events as JSON on standard output.

use std::io::{self, Write};

use serde_json::{Value, json};

use super::login::printable;

/// Where events go.
#[derive(Clone, Copy, Debug)]
pub(super) struct Report {
    has_json: bool,
}

impl Report {
    pub(super) const fn new(has_json: bool) -> Self {
        Self { has_json }
    }

    /// A line, and the event `name` with these fields.
    pub(super) fn tell(self, name: &str, line: &str, fields: Value) {
        let _ = writeln!(io::stderr().lock(), "weft: {}", printable(line));
        self.event(name, fields);
    }

    /// Something that is not as it should be, and goes on.
    pub(super) fn warn(self, line: &str) {
        self.tell("warning", line, json!({ "text": printable(line) }));
    }

    /// The event `name` with these fields, without a line.
    pub(super) fn event(self, name: &str, mut fields: Value) {
        if !self.has_json {
            return;
        }
        if let Some(object) = fields.as_object_mut() {
            object.insert("event".to_owned(), json!(name));
        }
        let mut out = io::stdout().lock();
        // Where nobody reads any more, the tunnel stays.
        let _ = writeln!(out, "{fields}").and_then(|()| out.flush());
    }
}

//! The results of a guest's tests: its output is cut into programs, and each test is counted, even if the guest
//! died before it ran.

/// Begins a line for the host.
const MARK: &str = "@weft-vm";

/// Takes a guest's output as it comes.
pub(crate) struct Report {
    /// Programs whose end has not been seen, with their tests, in the order in which they run.
    expected: Vec<(String, Vec<String>)>,
    held: Vec<u8>,
    block: String,
    failed: bool,
}

/// The command of the guest's script that announces a program.
pub(crate) fn begin_command(target: &str) -> String {
    format!("SECONDS=0; echo; echo {MARK} begin {target}")
}

/// The command that tells a program's end; exit code and seconds follow it.
pub(crate) fn end_command(target: &str) -> String {
    format!("echo {MARK} end {target}")
}

impl Report {
    pub(crate) const fn new(expected: Vec<(String, Vec<String>)>) -> Self {
        Self { expected, held: Vec::new(), block: String::new(), failed: false }
    }

    /// Takes more output and gives the whole output of each program that has ended.
    pub(crate) fn feed(&mut self, bytes: &[u8]) -> Vec<String> {
        self.held.extend_from_slice(bytes);
        let mut blocks = Vec::new();
        while let Some(at) = self.held.iter().position(|byte| *byte == b'\n') {
            let line: Vec<u8> = self.held.drain(..=at).collect();
            blocks.extend(self.line(&String::from_utf8_lossy(&line)));
        }
        blocks
    }

    /// Reports the rest of the output when the guest is gone: tests that did not end have failed.
    pub(crate) fn finish(&mut self) -> Option<String> {
        let rest = std::mem::take(&mut self.held);
        self.block.push_str(&String::from_utf8_lossy(&rest));
        let mut block = std::mem::take(&mut self.block);
        let left = std::mem::take(&mut self.expected);
        if left.is_empty() {
            return (!block.trim().is_empty()).then_some(block);
        }
        self.failed = true;
        block.push('\n');
        for (target, tests) in left {
            let passed = passed_in(&block, &tests);
            block.push_str(&verdict(&target, passed, tests.len() - passed, "the guest ended"));
        }
        Some(block)
    }

    /// Whether each test has run and passed.
    pub(crate) const fn all_passed(&self) -> bool {
        !self.failed && self.expected.is_empty()
    }

    fn line(&mut self, line: &str) -> Option<String> {
        let words: Vec<&str> = line.split_whitespace().collect();
        match words[..] {
            [MARK, "begin", target] => {
                self.block = format!("{target}\n");
                None
            }
            [MARK, "end", target, code, seconds] => Some(self.end(target, code, seconds)),
            _ => {
                self.block.push_str(line);
                None
            }
        }
    }

    fn end(&mut self, target: &str, code: &str, seconds: &str) -> String {
        let mut block = std::mem::take(&mut self.block);
        let at = self.expected.iter().position(|(expected, _)| expected == target);
        let tests = at.map(|at| self.expected.remove(at).1).unwrap_or_default();
        self.failed |= code != "0";
        if !block.lines().any(|line| line.starts_with("test result:")) {
            self.failed = true;
            let passed = passed_in(&block, &tests);
            let why = format!("the program ended with code {code}");
            block.push_str(&verdict(target, passed, tests.len() - passed, &why));
        }
        block.push_str(&format!("{target}: {seconds} s\n"));
        block
    }
}

/// A line as libtest ends with, for a program that came to no such end.
fn verdict(target: &str, passed: usize, failed: usize, why: &str) -> String {
    format!("test result: FAILED. {passed} passed; {failed} failed; {target}: {why}\n")
}

/// How many of these tests libtest says have passed.
fn passed_in(block: &str, tests: &[String]) -> usize {
    let said = |test: &&String| {
        let line = format!("test {test} ... ");
        block.lines().any(|found| found.strip_prefix(&line).is_some_and(|end| end.ends_with("ok")))
    };
    tests.iter().filter(said).count()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    fn report() -> Report {
        let names = |names: &[&str]| names.iter().map(|&name| name.to_owned()).collect();
        Report::new(vec![("net_a".into(), names(&["x", "y"])), ("vm_b".into(), names(&["z"]))])
    }

    #[test]
    fn blocks_come_when_their_program_ends_however_the_output_is_cut() {
        let text = "\n@weft-vm begin net_a\nrunning 2 tests\ntest x ... ok\n\ntest result: ok. 2 passed; 0 failed;\n\
            @weft-vm end net_a 0 7\n\n@weft-vm begin vm_b\ntest result: ok. 1 passed; 0 failed;\n@weft-vm end vm_b 0 1\n";
        for size in [1, 7, text.len()] {
            let mut report = report();
            let pieces = text.as_bytes().chunks(size);
            let blocks: Vec<String> = pieces.flat_map(|piece| report.feed(piece)).collect();
            assert_eq!(blocks.len(), 2, "{blocks:?}");
            assert!(blocks[0].contains("running 2 tests") && blocks[0].ends_with("net_a: 7 s\n"));
            assert_eq!(report.finish(), None);
            assert!(report.all_passed());
        }
    }

    #[test]
    fn a_program_without_a_verdict_has_failed_in_all_that_did_not_pass() {
        let mut report = report();
        let blocks = report.feed(b"@weft-vm begin net_a\ntest x ... ok\ntest y ... @weft-vm\n@weft-vm end net_a 124 600\n");
        assert!(blocks[0].contains("test result: FAILED. 1 passed; 1 failed;"), "{blocks:?}");
        assert!(!report.all_passed());
    }

    #[test]
    fn tests_of_a_guest_that_died_have_failed() {
        let mut report = report();
        report.feed(b"@weft-vm begin net_a\ntest x ... ok\ntest y ... o");
        let block = report.finish().unwrap();
        assert!(block.contains("test result: FAILED. 1 passed; 1 failed; net_a"), "{block}");
        assert!(block.contains("test result: FAILED. 0 passed; 1 failed; vm_b"), "{block}");
        assert!(!report.all_passed());
    }

    #[test]
    fn a_failed_test_is_a_failure() {
        let mut report = report();
        report.feed(b"@weft-vm begin vm_b\ntest result: FAILED. 0 passed; 1 failed;\n@weft-vm end vm_b 101 3\n");
        report.feed(
            b"@weft-vm begin net_a\ntest result: ok. 2 passed; 0 failed;\n@weft-vm end net_a 0 3\n",
        );
        assert!(!report.all_passed());
    }
}
